"""The engine's extension, in an engine that can be made to keep old weights without a word."""

from async_grpo.weight_sync.vllm_extension import WeightsExtension


class WithholdingExtension(WeightsExtension):
    def withhold(self, names):
        """In every update from now on these parameters get what the update before brought."""
        self._withheld = names
        model = self.model_runner.model
        if "load_weights" in vars(model):
            return
        load, self._before = model.load_weights, {}

        def load_stale(weights):
            sent = {name: tensor.clone() for name, tensor in weights}
            self._before = sent | {name: self._before[name] for name in self._withheld}
            return load(iter(self._before.items()))

        model.load_weights = load_stale
