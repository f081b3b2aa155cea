"""A KV connector for vLLM that hands out hidden states: vLLM loads it by this module's path, see `vllm.extract`.

vLLM's speculative method `extract_hidden_states` keeps the chosen layers' hidden states in a cache of its own, like keys
and values. After each step the worker copies the new rows from that cache into the shard (shard_file.py), chunk by
chunk, so nothing has to be kept until a prompt is finished. Read: vLLM 0.20.2, 0.25.1 and 0.32.0; run: 0.25.1 (CUDA) and
0.32.0 (CPU).
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

from breakeven.shard_file import Writer


@dataclass
class Chunk:
    """What a step computes of one request: `count` positions from `first` on, and all blocks that hold its cache so far."""

    sequence: int
    first: int
    count: int
    blocks: list[int]


@dataclass
class Chunks(KVConnectorMetadata):
    chunks: list[Chunk] = field(default_factory=list)


class ShardConnector(KVConnectorBase_V1, SupportsHMA):
    """Request "i" is sequence i of the shard at `path` of the connector's extra config."""

    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        groups = kv_cache_config.kv_cache_groups if kv_cache_config is not None else []
        # Where vLLM makes one group of all layers (all of a dense target), they share their block table.
        self.group = next((i for i, g in enumerate(groups) if self._is_hidden_states(g)), 0)
        if len(groups) > 1 and not self._is_hidden_states(groups[self.group]):
            raise ValueError(f"none of vLLM's {len(groups)} cache groups is that of the hidden states")
        self.block_size = groups[self.group].kv_cache_spec.block_size if groups else vllm_config.cache_config.block_size
        self.blocks: dict[str, list[int]] = {}  # in the scheduler, by request
        self.cache = self.writer = None  # in the worker of the first rank

    @staticmethod
    def _is_hidden_states(group) -> bool:
        return type(group.kv_cache_spec).__name__ == "HiddenStateCacheSpec"

    # In the scheduler.

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output) -> Chunks:
        for finished in scheduler_output.finished_req_ids:
            self.blocks.pop(finished, None)
        first = {}
        for new in scheduler_output.scheduled_new_reqs:
            first[new.req_id] = new.num_computed_tokens
            self.blocks[new.req_id] = list(new.block_ids[self.group])
        cached = scheduler_output.scheduled_cached_reqs
        for name, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            first[name] = computed
            added = list(blocks[self.group]) if blocks is not None else []
            self.blocks[name] = added if name in cached.resumed_req_ids else self.blocks[name] + added
        return Chunks(
            [
                # vLLM's own ids are "i-" and random letters.
                Chunk(int(name.partition("-")[0]), at, scheduler_output.num_scheduled_tokens[name], self.blocks[name])
                for name, at in first.items()
            ]
        )

    def request_finished_all_groups(self, request, block_ids):
        return False, None

    # In the workers. Every rank holds the same hidden states; the first one writes them.

    def register_kv_caches(self, kv_caches):
        if get_tensor_model_parallel_rank() != 0:
            return
        (name,) = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        self.cache = kv_caches[name]
        if self.block_size not in self.cache.shape[1:3]:
            raise ValueError(f"vLLM's cache has the shape {tuple(self.cache.shape)}, not blocks of {self.block_size}")
        self.writer = Writer(Path(self._kv_transfer_config.kv_connector_extra_config["path"]))

    def wait_for_save(self):
        """Called once after each step, the drafter's part included: hand over the rows that it computed."""
        if self.writer is None:
            return
        pieces, slots = [], []
        for chunk in self._get_connector_metadata().chunks:
            length = self.writer.starts[chunk.sequence + 1] - self.writer.starts[chunk.sequence]
            count = min(chunk.count, length - chunk.first)  # no more than the prompt
            if count > 0:
                at = np.arange(chunk.first, chunk.first + count)
                slots.append(np.array(chunk.blocks)[at // self.block_size] * self.block_size + at % self.block_size)
                pieces.append((chunk.sequence, chunk.first, count))
        if pieces:
            where = torch.from_numpy(np.concatenate(slots))
            if self.cache.is_cuda:  # from pageable memory the copy would wait for the whole forward pass
                where = where.pin_memory().to(self.cache.device, non_blocking=True)
            self.writer.add(pieces, extract_from_kv_cache(self.cache, where, len(where)))

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def shutdown(self):
        if self.writer is not None:
            self.writer.close()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config):
        return ExampleHiddenStatesConnector.get_required_kvcache_layout(vllm_config)
