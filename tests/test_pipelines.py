"""Copies that run ahead of products in flight, told from lowered code."""

from __future__ import annotations

import pytest

from jagbench.pipelines import overwritten_operands

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
