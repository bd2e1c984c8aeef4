"""`EngineConfig`: how large the engine's batches, pages and memory may become."""

from dataclasses import dataclass

from quantforge.errors import UsageError

KV_CACHE_DTYPES = ("auto", "model", "fp8_e4m3", "fp8_e5m2", "int8")
CUDA_GRAPHS = ("auto", "on", "off")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Settings of an engine. Sizes are in tokens or sequences. Raises `UsageError`.

    - `device`, `dtype`: words of ``--device`` and ``--dtype``, read when a folder is loaded;
    - `page_size`: tokens of one page of the KV cache;
    - `max_num_seqs`, `max_num_batched_tokens`: most sequences, and most tokens, of one step;
    - `max_model_len`: most tokens of a sequence, None for what the model was trained for;
    - `kv_cache_dtype`: how keys and values are stored, one of `KV_CACHE_DTYPES`
      (`runtime/kv/storage.py`);
    - `kv_cache_tokens`: size of the KV cache, None to size it by the memory that is there, of
      which a GPU's engine uses the share `gpu_memory_utilization` in all;
    - `cuda_graphs`: ``auto`` replays decode steps as CUDA graphs where that works, ``on`` refuses
      to go on where it does not, ``off`` never does;
    - `seed`: from which requests without a seed of their own get theirs.
    """

    device: str = "auto"
    dtype: str = "auto"
    page_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_tokens: int | None = None
    gpu_memory_utilization: float = 0.90
    cuda_graphs: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("page_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)} must be at least 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise UsageError(f"max_model_len {self.max_model_len} must be at least 2")
        if self.kv_cache_tokens is not None and self.kv_cache_tokens < self.page_size:
            raise UsageError(
                f"kv_cache_tokens {self.kv_cache_tokens} must be at least one page of "
                f"{self.page_size} tokens"
            )
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise UsageError(
                f"kv_cache_dtype {self.kv_cache_dtype!r} is not one of {', '.join(KV_CACHE_DTYPES)}"
            )
        if self.cuda_graphs not in CUDA_GRAPHS:
            raise UsageError(
                f"cuda_graphs {self.cuda_graphs!r} is not one of {', '.join(CUDA_GRAPHS)}"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise UsageError(
                f"gpu_memory_utilization {self.gpu_memory_utilization} must lie in (0, 1]"
            )
