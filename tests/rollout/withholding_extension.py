"""The engine's extension, in an engine that can be made to keep old weights without a word."""

from pathlib import Path

from async_grpo.model.weight_files import tensors_in
from async_grpo.rollout.expert_choices import WorkerExtension


class WithholdingExtension(WorkerExtension):
    """All that the real one has: later engines of the same test process get this one too."""

    def withhold(self, names):
        """In every update from now on these parameters get what the update before brought."""
        self._withheld = names
        model = self.model_runner.model
        if "load_weights" in vars(model):
            return
        folder = Path(self.model_runner.model_config.model)
        load, self._before = model.load_weights, dict(tensors_in(folder))  # brought by the start

        def load_stale(weights):
            sent = {name: tensor.clone() for name, tensor in weights}
            self._before = sent | {name: self._before[name] for name in self._withheld}
            return load(iter(self._before.items()))

        model.load_weights = load_stale
