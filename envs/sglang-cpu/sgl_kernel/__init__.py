"""Stand-in for the CPU operators of sgl_kernel that SGLang 0.5.23 calls, in plain PyTorch: exact, not fast.

`attention` registers torch.ops.sgl_kernel.*, `cache` and `tree` hold the functions that SGLang imports by name. Shapes:
B requests, n draft tokens of a request with the root (SGLang's num_draft_tokens), K steps, V vocabulary.
"""

import importlib.machinery
import os
import sys
from importlib import metadata

__version__ = "1.0.0"
SGLANG_VERSION = "0.5.23"


def _refuse() -> None:
    """ImportError where this stand-in must not be used: another SGLang, or the real operators are installed."""
    try:
        found = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        found = "none"
    if found != SGLANG_VERSION:
        raise ImportError(
            f"envs/sglang-cpu stands in for the operators of SGLang {SGLANG_VERSION}, and SGLang {found} is installed;"
            " take the folder off PYTHONPATH or install that version"
        )
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    others = [path for path in sys.path if os.path.abspath(path or ".") != here]
    real = importlib.machinery.PathFinder.find_spec("sgl_kernel", others)
    if real is not None:
        raise ImportError(
            f"the real sgl_kernel is installed ({real.origin}); take envs/sglang-cpu off PYTHONPATH so that it is used"
        )


_refuse()

from sgl_kernel import attention  # noqa: E402, F401  (registers torch.ops.sgl_kernel.*)
from sgl_kernel.cache import (  # noqa: E402
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
)
from sgl_kernel.tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu  # noqa: E402

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
]
