"""Every option of `async-grpo serve`."""

from __future__ import annotations

from dataclasses import dataclass

from async_grpo.config.option import AT_LEAST_1, LOG_LEVELS, Options, option

TOKEN_VARIABLE = "ASYNC_GRPO_TOKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(Options):
    """Options of a gateway on one model."""

    host: str = option("127.0.0.1", group="Usual options")
    """address that it listens at; 0.0.0.0: every one of this machine, for whoever has the token"""
    port: int = option(8000)
    """port that it listens at; 0: any that is free"""
    renderer: str = option("auto")
    """how messages are written as tokens: auto; template, by the model's chat template; or a family
    of models of the package renderers"""
    model_revision: str = option("", none="")
    """branch, tag or commit of a model on a hub; empty: its main branch"""
    max_model_len: int = option(0)
    """longest prompt + output in tokens; 0: the model's own limit"""
    max_num_seqs: int = option(0)
    """sequences decoded together; 0: 64, on devices vLLM's own"""
    max_requests: int = option(256, must=AT_LEAST_1)
    """requests taken at a time; more are refused with 429"""
    max_sessions: int = option(256, must=AT_LEAST_1)
    """paths /s/NAME kept at a time; more are refused with 429"""
    dtype: str = option("auto", choices=("auto", "float32", "bfloat16"))
    """weights of the model"""
    kv_cache_gib: float = option(0.0)
    """KV cache in GiB; 0: 0.25 on CPU, vLLM's choice on GPU"""
    tensor_parallel_size: int = option(1, must=AT_LEAST_1)
    """devices that the model is sharded over"""
    logging_level: str = option("INFO", choices=LOG_LEVELS)
    """log detail"""

    def __post_init__(self) -> None:
        self.check_numbers()
        if self.port > 65535:
            raise self.refusal("port", "must be at most 65535", "8000 is usual")
