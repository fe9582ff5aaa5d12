"""What a check says that a worker's model serves is what the worker is asked for."""

from types import SimpleNamespace

from async_grpo.check import checks, worker_tables
from async_grpo.config.train_config import TrainConfig
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.model.model_folder import ModelFacts


def test_a_reference_is_told_by_the_tokens_that_it_scores_and_not_by_an_engine_s_limit(monkeypatch):
    monkeypatch.setattr(worker_tables, "check_engine", lambda *_: None)
    monkeypatch.setattr(checks, "check_worker", lambda *_: None)
    model = ModelFacts("m", 128, 512, (1,), "hash")
    engine = WorkerConfig(model_path="m", max_model_len=256)
    reference = WorkerConfig(mode="logprob", model_path="m", max_model_len=256)
    train = TrainConfig(model_name_or_path="m", data_path="d")
    setup = SimpleNamespace(workers=(engine, reference), train=train)
    facts = SimpleNamespace(
        worker_models=(model, model), model=model, data=(), engine_options=(), num_devices=0
    )
    served, scored = (found.text for found in checks.check_workers(setup, facts))
    assert served == "the generation worker serves m for 256 tokens"
    assert scored.startswith(
        "the reference worker scores 512 tokens with m, by --max-tokens-per-gpu"
    )
