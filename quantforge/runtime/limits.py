"""How long a sequence may be, and how many pages the KV cache gets."""

import logging

import torch

from quantforge.errors import UnsupportedError, UsageError
from quantforge.models.config import ModelConfig
from quantforge.models.decoder import Decoder
from quantforge.runtime.batch import build_batch
from quantforge.runtime.config import EngineConfig
from quantforge.runtime.graphs import GRAPH_BYTES, batch_ladder
from quantforge.runtime.kv import cache as kv_cache
from quantforge.runtime.kv.pool import BlockManager
from quantforge.runtime.kv.storage import KVStorage, kv_storage
from quantforge.runtime.request import Request, SamplingParams
from quantforge.runtime.runner import Runner
from quantforge.runtime.scheduler import Chunk

logger = logging.getLogger(__name__)


def cache_limits(decoder: Decoder, config: EngineConfig) -> tuple[int, int]:
    """(pages of the KV cache, tokens of the longest sequence) of an engine.

    Raises `UsageError` for a `max_model_len` beyond the model or the cache, `UnsupportedError` if
    no memory is left for a cache.
    """
    length = _sequence_limit(decoder.config, config.max_model_len)
    num_pages = _cache_pages(decoder, config, length)
    return num_pages, _fit(length, num_pages * config.page_size, config)


def storage_of(decoder: Decoder, config: EngineConfig) -> KVStorage:
    """How the KV cache of an engine stores keys and values."""
    return kv_storage(config.kv_cache_dtype, decoder.embed_tokens.dtype, decoder.kv_scales)


def _cache_pages(decoder: Decoder, config: EngineConfig, max_model_len: int) -> int:
    """Pages of the KV cache: as many as `config` asks for, else what memory has room for, but no
    more than `max_num_seqs` sequences can fill, and the page for each that admission leaves over.
    Raises `UnsupportedError` if there is none."""
    if config.kv_cache_tokens is not None:
        return config.kv_cache_tokens // config.page_size
    device = decoder.embed_tokens.device
    peak_bytes = _peak_bytes(decoder, config, max_model_len) if device.type == "cuda" else 0
    room = kv_cache.free_bytes(device, config.gpu_memory_utilization, peak_bytes)
    page_bytes = config.page_size * storage_of(decoder, config).bytes_per_token(decoder.config)
    most = config.max_num_seqs * (-(-max_model_len // config.page_size) + 1)
    pages = min(room // page_bytes, most)
    if pages < 1:
        raise UnsupportedError(
            f"no memory is left for a KV cache on {device}: {room} bytes, and a page of "
            f"{config.page_size} tokens takes {page_bytes}; use a smaller model or a higher "
            f"gpu_memory_utilization than {config.gpu_memory_utilization}"
        )
    return int(pages)


def _peak_bytes(decoder: Decoder, config: EngineConfig, max_model_len: int) -> int:
    """GPU memory at the peak of the largest step, measured by running one, and what the CUDA
    graphs of decode steps will hold."""
    device = decoder.embed_tokens.device
    num_seqs = config.max_num_seqs
    budget = config.max_num_batched_tokens
    lengths: list[int] = []
    while budget and len(lengths) < num_seqs:
        lengths.append(min(budget, max_model_len))
        budget -= lengths[-1]
    pages = sum(-(-length // config.page_size) for length in lengths)
    pool = BlockManager(max(pages, num_seqs), config.page_size)
    torch.cuda.reset_peak_memory_stats(device)
    runner = Runner(decoder, pool.num_pages, config.page_size, storage_of(decoder, config))
    chunks = [_profile_chunk(pool, f"prefill-{i}", n) for i, n in enumerate(lengths)]
    hidden = runner.hidden(build_batch(chunks, pool, device))
    scores = decoder.logits(hidden[:num_seqs])
    del hidden, scores
    peak = torch.cuda.max_memory_allocated(device)
    if config.cuda_graphs != "off":
        for chunk in chunks:
            pool.release(chunk.request.request_id)
        chunks = [_profile_chunk(pool, f"decode-{i}", 1) for i in range(num_seqs)]
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        runner.hidden(build_batch(chunks, pool, device))
        peak += torch.cuda.max_memory_allocated(device) - before
        peak += GRAPH_BYTES * len(batch_ladder(num_seqs))
    del runner
    torch.cuda.empty_cache()
    return peak


def _profile_chunk(pool: BlockManager, request_id: str, length: int) -> Chunk:
    """A prompt of `length` tokens, with pages of `pool`."""
    request = Request(
        request_id=request_id,
        token_ids=[0] * length,
        num_prompt=length,
        params=SamplingParams(),
        max_tokens=1,
        seed=0,
        arrival=0,
    )
    assert pool.grow(request_id, length)
    return Chunk.next_of(request, length)


def _sequence_limit(config: ModelConfig, asked: int | None) -> int:
    """Tokens of the longest sequence. Raises `UsageError` beyond what the rope scaling allows."""
    trained = config.max_position_embeddings
    if asked is None:
        return trained
    parameters = config.rope.parameters
    limit = trained
    if config.rope.kind in ("dynamic", "yarn"):
        original = parameters.get("original_max_position_embeddings") or trained
        limit = max(trained, int(original * (parameters.get("factor") or 1)))
    if asked > limit:
        raise UsageError(f"max_model_len {asked} is more than the model's {limit} positions")
    return asked


def _fit(length: int, capacity: int, config: EngineConfig) -> int:
    """`length`, or the KV cache's size if that is smaller and no length was asked for."""
    if length <= capacity:
        return length
    if config.max_model_len is not None:
        raise UsageError(
            f"max_model_len {length} is more than the {capacity} tokens of the KV cache"
        )
    logger.info("sequences are limited to %s tokens, the size of the KV cache", capacity)
    return capacity
