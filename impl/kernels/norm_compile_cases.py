"""What the kernels of norm_linear and of the PFFN block are compiled to ahead of time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from jagbench.ahead_of_time import ARCHITECTURES, MATRIX_OPCODES, SHARED_LIMITS, CompileCase
from jagbench.impl.kernels.hopper import norm_gradient_launch as gradient
from jagbench.impl.kernels.hopper import norm_product_launch as product
from jagbench.impl.kernels.norm_linear_launch import (
    NormKernel,
    NormTiles,
    fitting,
    gradient_tiles,
    row_tile,
    table_tiles,
)
from jagbench.impl.kernels.pffn_block import pffn_tile
from jagbench.impl.kernels.tuning import padded

_MODULE = "jagbench.impl.kernels.norm_linear_kernels"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_NO_PRODUCT: dict[int, str | None] = dict.fromkeys(ARCHITECTURES)
_COUNTS = {"batch": "i32", "total": "i32", "tiles": "i32"}
_MANY = 1 << 20
# Bytes of stack a thread: whole rows are loaded while registers hold accumulators; masks of uneven
# features take a few; so does all that is beside an accumulator of 128 registers.
_PARKED, _SOME, _FEW = 256, 128, 32
# The same of a Hopper kernel's scalars, outside its loops.
_SCALARS = 96
_LARGE, _SMALL = (90, 100), (80, 120)


def _case(
    name: str,
    kernel: str,
    dtype: str,
    signature: dict[str, str],
    constants: dict[str, Any],
    tiles: NormTiles | None,
    **others: Any,
) -> CompileCase:
    warps = {} if tiles is None else {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    strides = [n for n in signature if n.endswith(("_row", "w_out", "w_in"))]
    multiplies = tiles is not None and dtype != "fp32"
    return CompileCase(
        name=f"{name}-{dtype}",
        kernel=f"{_MODULE}:{kernel}",
        signature=signature,
        constexprs=constants,
        aligned=(*(n for n, kind in signature.items() if kind[0] == "*"), *strides),
        dtype=dtype,
        matrix_opcode=MATRIX_OPCODES if multiplies else _NO_PRODUCT,
        **{**warps, "may_spill": dtype == "fp32", **others},
    )


def _tiles(
    kernel: NormKernel, dtype: str, columns: int, depth: int, architectures: tuple[int, ...]
) -> NormTiles:
    """Those that the smallest of the architectures takes of a large problem."""
    limit = min(SHARED_LIMITS[arch] for arch in architectures)
    found = table_tiles(kernel, _DTYPES[dtype])
    whole = kernel == "norm_input_gradient"
    return fitting(found, _MANY, columns, depth, _DTYPES[dtype].itemsize, limit, 1, whole)


def _forward(
    dtype: str,
    features: int,
    width: int,
    norm: str,
    tag: str,
    architectures: tuple[int, ...] = ARCHITECTURES,
    tiles: NormTiles | None = None,
) -> CompileCase:
    """A forward, or (norm "none") the product of the gradient of wide rows."""
    layer, back = norm == "layer", norm == "none"
    kernel: NormKernel = "norm_linear_layer" if layer else "norm_linear_rms"
    if tiles is None:
        tiles = _tiles("norm_product" if back else kernel, dtype, width, features, architectures)
    signature = {
        "x": f"*{dtype}", "w": f"*{dtype}", "out": f"*{dtype}", "offsets": "*i32",
        **({} if back else {"bias": "*fp32", "statistics": "*fp32"}),
        **_COUNTS, "eps": "fp32", "x_row": "i32", ("w_in" if back else "w_out"): "i32",
    }  # fmt: skip
    constants = {
        **({"bias": None, "statistics": None, "w_out": 1} if back else {"w_in": 1}),
        "x_tiles": None, "w_tiles": None, "FEATURES": features, "WIDTH": width, "NORM": norm,
        "EXACT": dtype == "fp32", "ROWS": tiles.rows, "COLUMNS": tiles.columns,
        "DEPTH": tiles.depth, "DESCRIPTORS": tiles.descriptors, "FLATTEN": tiles.persistent,
    }  # fmt: skip
    if tiles.descriptors:
        signature["x_tiles"] = f"tensordesc<{dtype}[{tiles.rows}, {tiles.depth}]>"
        signature["w_tiles"] = f"tensordesc<{dtype}[{tiles.columns}, {tiles.depth}]>"
        constants = {n: v for n, v in constants.items() if n not in ("x_tiles", "w_tiles")}
    name = f"norm_{'product' if back else norm}-{tag}-k{features}-n{width}"
    return _case(
        name, "norm_product_kernel", dtype, signature, constants, tiles,
        architectures=architectures, spill_limit=_FEW if features % tiles.depth else 0,
    )  # fmt: skip


def _input_gradient(
    dtype: str, features: int, width: int, norm: str, architectures: tuple[int, ...]
) -> CompileCase:
    tiles = _tiles("norm_input_gradient", dtype, features, width, architectures)
    pointers = dict.fromkeys(("x", "w", "d_out", "dx"), f"*{dtype}")
    signature = {
        **pointers, "statistics": "*fp32", "offsets": "*i32", **_COUNTS,
        **dict.fromkeys(("x_row", "w_row", "d_row"), "i32"),
    }  # fmt: skip
    constants = {
        "FEATURES": features, "WIDTH": width, "NORM": norm, "ROWS": tiles.rows,
        "BLOCK": padded(features), "DEPTH": tiles.depth,
    }  # fmt: skip
    return _case(
        f"norm_input_gradient-{norm}-k{features}-n{width}", "norm_input_gradient_kernel", dtype,
        signature, constants, tiles, architectures=architectures, spill_limit=_PARKED,
    )  # fmt: skip


def _rows_gradient(dtype: str, features: int, norm: str) -> CompileCase:
    rows, block, warps = row_tile(features)
    signature = {
        **dict.fromkeys(("x", "gradient", "dx"), f"*{dtype}"), "statistics": "*fp32",
        "offsets": "*i32", "batch": "i32", "total": "i32", "x_row": "i32",
    }  # fmt: skip
    constants = {"FEATURES": features, "NORM": norm, "ROWS": rows, "BLOCK": block}
    return _case(
        f"norm_rows_gradient-{norm}-k{features}", "norm_rows_gradient_kernel", dtype, signature,
        constants, None, num_warps=warps,
    )  # fmt: skip


def _weight_gradient(
    dtype: str, features: int, width: int, norm: str, architectures: tuple[int, ...] = ARCHITECTURES
) -> CompileCase:
    limit = min(SHARED_LIMITS[arch] for arch in architectures)
    found = table_tiles("norm_weight_gradient", _DTYPES[dtype])
    tiles = gradient_tiles(found, _MANY, features, width, _DTYPES[dtype].itemsize, limit, 1)
    signature = {
        "x": f"*{dtype}", "d_out": f"*{dtype}", "partial": "*fp32", "sums": "*fp32",
        "statistics": "*fp32", "offsets": "*i32", "batch": "i32", "total": "i32", "run": "i32",
        "x_row": "i32", "d_row": "i32",
    }  # fmt: skip
    constants = {
        "FEATURES": features, "WIDTH": width, "NORM": norm, "EXACT": dtype == "fp32",
        "INPUTS": tiles.rows,
        "OUTPUTS": tiles.columns, "DEPTH": tiles.depth,
    }  # fmt: skip
    tag = "-small_shared" if architectures == _SMALL else ""
    return _case(
        f"norm_weight_gradient-{norm}{tag}-k{features}-n{width}", "norm_weight_gradient_kernel",
        dtype, signature, constants, tiles, architectures=architectures,
        spill_limit=_FEW if tiles.num_warps > 4 else _SOME,
    )  # fmt: skip


def _hopper_product(
    dtype: str, features: int, norm: str, bias: bool, offsets: bool = True
) -> CompileCase:
    """No product waits for registers; scalars of the bias may be parked."""
    steps = -(-features // product.DEPTH)
    x, w = (
        f"tensordesc<{dtype}[1, 1, {rows}, {product.DEPTH}]>"
        for rows in (product.BLOCK_ROWS, product.COLUMNS)
    )
    tag = "bias" if bias else "plain"
    return CompileCase(
        name=f"hopper_norm_{norm}-{tag}-k{features}-{dtype}",
        kernel="jagbench.impl.kernels.hopper.norm_product:norm_product_kernel",
        signature={
            "x_desc": x, "w_desc": w, "out_desc": x, "bias": "*fp32", "statistics": "*fp32",
            "offsets": "*i32", "batch": "i32", "total": "i32", "columns": "i32", "width": "i32",
            "features": "i32", "eps": "fp32",
        },
        constexprs={
            "GROUPS": product.GROUPS, "STEPS": steps, "STAGES": product.stages_of(steps),
            "NORM": norm,
            "HAS_BIAS": bias, "HAS_OFFSETS": offsets, "BUFFERS": product.BUFFERS,
        },
        aligned=("bias", "statistics", "offsets"),
        num_warps=4,
        dtype=dtype,
        architectures=(90,),
        opcodes=("UTMALDG", "UTMASTG", "USETMAXREG"),
        max_registers=product.MAX_REGISTERS,
        spill_limit=_SCALARS if norm == "layer" else 0,
    )  # fmt: skip


def _statistics(dtype: str, features: int) -> CompileCase:
    rows, block, warps = row_tile(features)
    signature = {
        "x": f"*{dtype}", "statistics": "*fp32", "offsets": "*i32", "batch": "i32",
        "total": "i32", "eps": "fp32", "x_row": "i32",
    }  # fmt: skip
    constants = {"FEATURES": features, "EXACT": False, "ROWS": rows, "BLOCK": block}
    return _case(
        f"norm_statistics-k{features}", "norm_statistics_kernel", dtype, signature, constants,
        None, num_warps=warps,
    )  # fmt: skip


def _hopper_weight_gradient(
    dtype: str, features: int, width: int, norm: str, offsets: str | None = "*i32"
) -> CompileCase:
    """The accumulator, an operand and the next one fit; scalars of the lone warps may not."""
    outputs, stages = gradient.output_tile(width)
    signature = {
        "x_desc": f"tensordesc<{dtype}[1, 1, {gradient.ROWS}, {gradient.INPUTS}]>",
        "d_desc": f"tensordesc<{dtype}[1, 1, {gradient.ROWS}, {outputs}]>",
        "partial": "*fp32", "sums": "*fp32", "statistics": "*fp32",
        **({} if offsets is None else {"offsets": offsets}),
        "batch": "i32", "total": "i32", "splits": "i32",
    }  # fmt: skip
    constants = {
        **({"offsets": None} if offsets is None else {}), "FEATURES": features, "WIDTH": width,
        "LAYER": norm == "layer", "OUTPUTS": outputs, "STAGES": stages,
    }  # fmt: skip
    tag = "dense" if offsets is None else offsets.removeprefix("*")
    return CompileCase(
        name=f"hopper_norm_gradient-{norm}-{tag}-k{features}-n{width}-{dtype}",
        kernel="jagbench.impl.kernels.hopper.norm_gradient:norm_gradient_kernel",
        signature=signature,
        constexprs=constants,
        aligned=("partial", "sums", "statistics"),
        num_warps=4,
        dtype=dtype,
        architectures=(90,),
        opcodes=("UTMALDG", "LDGSTS", "USETMAXREG"),
        max_registers=gradient.MAX_REGISTERS,
        spill_limit=_FEW,
    )


def _pffn(kernel: str, dtype: str, *tensors: str) -> CompileCase:
    """A kernel over rows of 4 heads of 128, about a GDPA."""
    rows, block, warps = pffn_tile(512)
    signature = {
        **dict.fromkeys(tensors, f"*{dtype}"), "offsets": "*i32", "batch": "i32", "total": "i32",
        "eps": "fp32",
    }  # fmt: skip
    case = _case(
        kernel.removesuffix("_kernel"), kernel, dtype, signature,
        {"FEATURES": 512, "ROWS": rows, "BLOCK": block}, None, num_warps=warps,
    )  # fmt: skip
    return replace(case, kernel=f"jagbench.impl.kernels.pffn_kernels:{kernel}")


NORM_CASES: tuple[CompileCase, ...] = (
    _forward("bf16", 512, 512, "rms", "large", _LARGE),
    _forward("bf16", 512, 512, "rms", "small_shared", _SMALL),
    _forward("fp16", 512, 64, "rms", "narrow"),
    _forward("bf16", 600, 130, "rms", "uneven"),
    _forward("bf16", 512, 512, "rms", "persistent", _LARGE,
             NormTiles(128, 256, 64, 8, 3, persistent=True)),
    _forward("bf16", 512, 512, "rms", "descriptors", _LARGE,
             NormTiles(128, 256, 64, 8, 4, persistent=True, descriptors=True)),
    _forward("fp32", 512, 512, "rms", "exact"),
    _forward("bf16", 512, 512, "layer", "large", _LARGE),
    _forward("bf16", 512, 512, "layer", "small_shared", _SMALL),
    _forward("fp16", 200, 96, "layer", "uneven"),
    _forward("fp32", 512, 512, "layer", "exact"),
    _forward("bf16", 1024, 1024, "none", "backward", _LARGE),
    _forward("bf16", 1024, 1024, "none", "backward_small_shared", _SMALL),
    _hopper_product("bf16", 512, "rms", bias=False),
    _hopper_product("fp16", 200, "rms", bias=True, offsets=False),
    _hopper_product("bf16", 512, "layer", bias=True),
    _hopper_product("fp16", 256, "layer", bias=False),
    _statistics("bf16", 512),
    _statistics("fp16", 200),
    _input_gradient("bf16", 512, 512, "rms", (90,)),
    _input_gradient("bf16", 512, 512, "layer", (90,)),
    _input_gradient("bf16", 256, 256, "layer", ARCHITECTURES),
    _input_gradient("fp16", 256, 512, "rms", ARCHITECTURES),
    _input_gradient("fp32", 64, 64, "layer", ARCHITECTURES),
    _rows_gradient("bf16", 1024, "rms"),
    _rows_gradient("bf16", 640, "layer"),
    _rows_gradient("fp32", 4096, "layer"),
    _weight_gradient("bf16", 512, 512, "rms", _LARGE),
    _weight_gradient("bf16", 512, 512, "rms", _SMALL),
    _weight_gradient("fp16", 200, 96, "layer", _LARGE),
    _weight_gradient("fp16", 200, 96, "layer", _SMALL),
    _weight_gradient("bf16", 1024, 1024, "layer", _LARGE),
    _weight_gradient("bf16", 1024, 1024, "layer", _SMALL),
    _weight_gradient("fp32", 512, 512, "rms"),
    _hopper_weight_gradient("bf16", 512, 512, "rms"),
    _hopper_weight_gradient("bf16", 512, 512, "layer"),
    _hopper_weight_gradient("fp16", 1024, 1024, "layer", "*i64"),
    _hopper_weight_gradient("fp16", 128, 384, "rms", None),
    _hopper_weight_gradient("bf16", 1152, 128, "layer", None),
    _pffn("pffn_enter_kernel", "bf16", "q", "ln"),
    _pffn("pffn_leave_kernel", "bf16", "attended", "q", "out"),
    _pffn("pffn_inner_gradient_kernel", "bf16", "d_out", "attended", "q", "d_inner"),
    _pffn("pffn_query_gradient_kernel", "bf16", "d_out", "attended", "q", "d_ln", "dq"),
    _pffn("pffn_query_gradient_kernel", "fp32", "d_out", "attended", "q", "d_ln", "dq"),
)  # fmt: skip
