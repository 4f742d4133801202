"""Arguments that fit every operator, and changes that must be refused with their numbers."""

import torch
from oracles import offsets_of

from jagbench.bias import BucketedBias

GOOD = {
    "q": torch.zeros(6, 4, 8),
    "k": torch.zeros(7, 2, 8),
    "v": torch.zeros(7, 2, 3),
    "q_offsets": offsets_of([2, 4]),
    "k_offsets": offsets_of([3, 4]),
}
#: Name -> changed arguments, and what the message must say.
BAD = {
    "first offset": ({"q_offsets": torch.tensor([1, 2, 6])}, "start at 0, got 1"),
    "decreasing": ({"k_offsets": torch.tensor([0, 5, 3])}, "index 2: 5 to 3"),
    "offsets dtype": ({"q_offsets": torch.tensor([0.0, 2.0, 6.0])}, "float32"),
    "offsets ndim": ({"k_offsets": torch.zeros(1, 3, dtype=torch.int64)}, r"\(1, 3\)"),
    "no offsets": ({"k_offsets": None}, "NoneType"),
    "empty offsets": ({"q_offsets": torch.zeros(0, dtype=torch.int64)}, r"\(0,\)"),
    "past the end": ({"k_offsets": torch.tensor([0, 3, 8])}, "8, past the 7 rows"),
    "batch sizes": ({"q_offsets": torch.tensor([0, 6])}, "1 sequences and k_offsets 2"),
    "offsets device": ({"q_offsets": offsets_of([2, 4]).to("meta")}, "meta"),
    "device": ({"v": torch.zeros(7, 2, 3, device="meta")}, "meta"),
    "dtype": ({"k": torch.zeros(7, 2, 8).half()}, "float16"),
    "integer dtype": ({"q": torch.zeros(6, 4, 8, dtype=torch.int32)}, "int32"),
    "ndim": ({"q": torch.zeros(6, 32)}, r"\(6, 32\)"),
    "heads": ({"q": torch.zeros(6, 3, 8)}, "2 kv_heads do not divide 3 heads"),
    "head_dim": ({"q": torch.zeros(6, 4, 9)}, "9 and k has 8"),
    "k and v rows": ({"v": torch.zeros(8, 2, 3)}, r"\(7, 2\) and \(8, 2\)"),
    "k and v heads": ({"v": torch.zeros(7, 1, 3)}, r"\(7, 2\) and \(7, 1\)"),
    "longest query": ({"max_q_len": 3}, "max_q_len is 3, .* has 4"),
    "longest key": ({"max_k_len": 3}, "max_k_len is 3, .* has 4"),
    "longest dense query": ({"q_offsets": None, "max_q_len": 5}, "max_q_len is 5, .* has 6"),
    "window": ({"window": (-1, 2)}, "got -1"),
    "window fraction": ({"window": (2, 1.5)}, "right .* whole number .* got 1.5"),
    "window truth": ({"window": (True, 2)}, "left .* whole number .* got True"),
    "window word": ({"window": "ab"}, "'ab'"),
    "window sides": ({"window": (1, 2, 3)}, r"\(1, 2, 3\)"),
    "align": ({"align": "left"}, "'left'"),
    "prefix": ({"prefix": -2}, "prefix .* got -2"),
    "last queries": ({"last_full": -1}, "last_full .* got -1"),
    "bias rows": ({"bias": torch.zeros(21, 4)}, "21 rows for 22"),
    "bias heads": ({"bias": torch.zeros(22, 2)}, r"\(22, 2\)"),
    "bias dtype": ({"bias": torch.zeros(22, 4).half()}, "float16"),
    "bucket count": (
        {"bias": BucketedBias(torch.zeros(3, 4), torch.full((22,), 3))},
        r"\[3, 3\], and the table has 3",
    ),
    "bucket ids": (
        {"bias": BucketedBias(torch.zeros(3, 4), torch.zeros(20, dtype=torch.int32))},
        r"\(20,\)",
    ),
    "bucket dtype": ({"bias": BucketedBias(torch.zeros(3, 4), torch.zeros(22))}, "float32"),
    "table heads": (
        {"bias": BucketedBias(torch.zeros(3, 3), torch.zeros(22, dtype=torch.int32))},
        r"\(3, 3\)",
    ),
}
