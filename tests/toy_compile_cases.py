"""Small kernels, good and bad, that try the ahead-of-time harness."""

import os

import triton
import triton.language as tl

from jagbench.ahead_of_time import ARCHITECTURES, CompileCase


@triton.jit
def product(a, b, out, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    rows = tl.arange(0, SIZE)
    tile = rows[:, None] * SIZE + rows[None, :]
    x = tl.load(a + tile)
    y = tl.load(b + tile)
    tl.store(out + tile, tl.dot(x.to(DTYPE), y.to(DTYPE)))


@triton.jit
def crowded(a, out, SIZE: tl.constexpr):
    """One warp holds two tiles of more values than it has registers."""
    index = tl.arange(0, SIZE)
    x = tl.load(a + index)
    y = tl.load(a + SIZE + index)
    total = tl.sum(x * y)
    tl.store(out + index, x * total)
    tl.store(out + SIZE + index, y * total)


def __getattr__(name: str) -> object:
    if name == "crash":  # stands in for a kernel that takes the compiler down
        print("LLVM ERROR: Cannot select", flush=True)
        os.abort()
    raise AttributeError(name)


POINTERS = {"a": "*bf16", "b": "*bf16", "out": "*fp32"}

CASES = (
    CompileCase(
        name="product-bf16",
        kernel="toy_compile_cases:product",
        signature=POINTERS,
        constexprs={"SIZE": 64, "DTYPE": tl.bfloat16},
        aligned=("a", "b", "out"),
    ),
    CompileCase(
        name="product-without-scales",
        kernel="toy_compile_cases:product",
        signature=POINTERS,
        constexprs={"SIZE": 64, "DTYPE": tl.bfloat16},
        ptx=("wgmma", "block_scale"),
    ),
    CompileCase(
        name="product-fp8",
        kernel="toy_compile_cases:product",
        signature={"a": "*fp8e4nv", "b": "*fp8e4nv", "out": "*fp32"},
        constexprs={"SIZE": 64, "DTYPE": tl.float8e4nv},
    ),
    CompileCase(
        name="crowded-fp32",
        kernel="toy_compile_cases:crowded",
        signature={"a": "*fp32", "out": "*fp32"},
        constexprs={"SIZE": 8192},
        num_warps=1,
        matrix_opcode=dict.fromkeys(ARCHITECTURES),
    ),
    CompileCase(
        name="crash",
        kernel="toy_compile_cases:crash",
        signature={},
        constexprs={},
    ),
    CompileCase(
        name="incomplete",
        kernel="toy_compile_cases:product",
        signature={"a": "*bf16"},
        constexprs={"SIZE": 64},
    ),
    *(
        CompileCase(
            name=name,
            kernel="toy_gluon:repeated_product",
            signature={"a_desc": "tensordesc<bf16[64, 64]>", "out": "*fp32", "count": "i32"},
            constexprs={"TOUCHED": touched},
            architectures=(90,),
            opcodes=("UTMALDG",),
        )
        for name, touched in (("gluon-bf16", False), ("gluon-touched-bf16", True))
    ),
)
