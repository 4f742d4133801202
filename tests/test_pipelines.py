"""Copies that run ahead of products in flight, told from lowered code."""

from __future__ import annotations

import pytest

from jagbench.pipelines import early_releases, overwritten_operands

#: Two copies are issued before the loop; a product stays in flight from step to step.
_LOOP = """
  %x = ttg.local_alloc : () -> !ttg.memdesc<{x}x128x64xbf16, #shared, #smem, mutable>
  %w = ttg.local_alloc : () -> !ttg.memdesc<3x256x64xbf16, #shared, #smem, mutable>
  %x_0 = ttg.memdesc_index %x[%c0] : !ttg.memdesc<{x}x128x64xbf16>
  %t0 = ttg.async_copy_global_to_local %p0, %x_0 mask %m other %z : tensor<128x64x!tt.ptr<bf16>>
  %w_0 = ttg.memdesc_index %w[%c0] : !ttg.memdesc<3x256x64xbf16>
  %t1 = ttg.async_copy_global_to_local %p1, %w_0 mask %m other %z : tensor<256x64x!tt.ptr<bf16>>
  %x_1 = ttg.memdesc_index %x[%c1] : !ttg.memdesc<{x}x128x64xbf16>
  %t2 = ttg.async_copy_global_to_local %p2, %x_1 mask %m other %z : tensor<128x64x!tt.ptr<bf16>>
  %w_1 = ttg.memdesc_index %w[%c1] : !ttg.memdesc<3x256x64xbf16>
  %t3 = ttg.async_copy_global_to_local %p3, %w_1 mask %m other %z : tensor<256x64x!tt.ptr<bf16>>
  %r:2 = scf.for %k = %c0 to %n step %c64 iter_args(%acc = %zero) -> (tensor<128x256xf32>)  : i32 {{
    %a = ttg.memdesc_index %x[%i] : !ttg.memdesc<{x}x128x64xbf16>
    %b = ttg.memdesc_index %w[%i] : !ttg.memdesc<3x256x64xbf16>
    %c = ttg.memdesc_trans %b {{order = array<i32: 1, 0>}} : !ttg.memdesc<256x64xbf16>
    %d = ttng.warp_group_dot %a, %c, %acc {{isAsync = true}} : !ttg.memdesc<128x64xbf16>
    %e:3 = ttng.warp_group_dot_wait %d, %a, %c {{pendings = {pendings} : i32}} : tensor<128x256xf32>
    %f = ttg.memdesc_index %x[%j] : !ttg.memdesc<{x}x128x64xbf16>
    %t4 = ttg.async_copy_global_to_local %p4, %f mask %m other %z : tensor<128x64x!tt.ptr<bf16>>
    %g = ttg.memdesc_index %w[%j] : !ttg.memdesc<3x256x64xbf16>
    %t5 = ttg.async_copy_global_to_local %p5, %g mask %m other %z : tensor<256x64x!tt.ptr<bf16>>
    scf.yield %e#0 : tensor<128x256xf32>
  }} loc(#loc1)
"""


def test_a_buffer_too_few_under_a_product_in_flight_is_found() -> None:
    [problem] = overwritten_operands(_LOOP.format(x=2, pendings=1))
    assert problem.startswith("%x: 2 buffers, copies 2 steps ahead")


@pytest.mark.parametrize(("x", "pendings"), [(3, 1), (2, 0)])
def test_enough_buffers_or_no_product_in_flight_is_right(x: int, pendings: int) -> None:
    assert overwritten_operands(_LOOP.format(x=x, pendings=pendings)) == []


def test_copies_of_another_loop_do_not_count() -> None:
    before = """
  %y = ttg.local_alloc : () -> !ttg.memdesc<3x128x64xbf16, #shared, #smem, mutable>
  scf.for %k = %c0 to %n step %c64  : i32 {
    %h = ttg.memdesc_index %x[%k] : !ttg.memdesc<3x128x64xbf16>
    %t9 = ttg.async_copy_global_to_local %p9, %h mask %m other %z : tensor<128x64x!tt.ptr<bf16>>
  }
"""
    assert overwritten_operands(before + _LOOP.format(x=3, pendings=1)) == []


#: A tile goes to registers, its buffer back to the one who fills it, and a product takes the tile.
_RELEASE = """
    partition0(%arg: !ttg.memdesc<8x64x64xbf16>) num_warps(4) {{
      %x = ttg.local_load %slot : !ttg.memdesc<64x64xbf16, #shared, #smem> -> tensor<64x64xbf16>
      {before}
      ttng.arrive_barrier %empty, 1, %true : !ttg.memdesc<1xi64, #shared1, #smem, mutable>
      %d = ttng.warp_group_dot %x, %w, %acc {{isAsync = true}} : tensor<64x64xbf16>
      ttg.warp_return
    }} loc(#loc1)
"""


def test_a_buffer_released_before_its_tile_is_in_registers_is_found() -> None:
    [problem] = early_releases(_RELEASE.format(before="%y = arith.addf %x_1, %x_2 : f32"))
    assert problem.startswith("%x: loaded on line 3, not used before the arrival on line 5")


def test_a_use_before_the_release_is_right() -> None:
    assert early_releases(_RELEASE.format(before="%y = arith.extf %x : tensor<64x64xbf16>")) == []


def test_loads_of_another_partition_do_not_count() -> None:
    other = """
    default {
      %s = ttg.local_load %row : !ttg.memdesc<64xf32, #shared, #smem> -> tensor<64xf32>
      ttg.warp_yield
    }
"""
    assert early_releases(other + _RELEASE.format(before="%y = arith.extf %x : f32")) == []
