"""Public kernels as implementations: each module here is an adapter for `--impl=`.

An adapter keeps the pinned signature, converts between conventions where that is exact, and raises
NotImplementedError with a reason where its library cannot do what is asked or is not installed.
Padding, masks and layout changes are part of the call; `prepare` does them beforehand.
"""

from collections.abc import Mapping

#: What to give `--impl=`, by a short name.
PEERS: Mapping[str, str] = {
    "padded-sdpa-flash": "jagbench.peers.padded_sdpa:flash",
    "padded-sdpa-cudnn": "jagbench.peers.padded_sdpa:cudnn",
    "padded-sdpa-math": "jagbench.peers.padded_sdpa:math",
    "varlen-attn": "jagbench.peers.varlen_attn",
    "flex-attention": "jagbench.peers.flex_attention",
    "nested-sdpa": "jagbench.peers.nested_sdpa",
    "flash-attention-4": "jagbench.peers.flash_attention_4",
    "fbgemm-jfa": "jagbench.peers.fbgemm_jfa",
    "flash-linear-attention": "jagbench.peers.flash_linear_attention",
    "torch-compile": "jagbench.peers.torch_compile",
}

#: The same of norm_linear.
NORM_LINEAR_PEERS: Mapping[str, str] = {
    "torch-norm-linear": "jagbench.peers.torch_norm_linear",
    "torch-norm-linear-compiled": "jagbench.peers.torch_norm_linear:compiled_chain",
}

#: The same of mx_quantize.
MX_QUANTIZE_PEERS: Mapping[str, str] = {
    "torchao-mx": "jagbench.peers.torchao_mx",
    "torchao-mx-compiled": "jagbench.peers.torchao_mx:compiled",
    "torchao-mx-kernels": "jagbench.peers.torchao_mx:kernels",
}

__all__ = ["MX_QUANTIZE_PEERS", "NORM_LINEAR_PEERS", "PEERS"]
