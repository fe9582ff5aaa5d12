"""Watch every operation of a block, forward and backward."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Records the most elements of any tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


class NumbersRead(TorchDispatchMode):
    """Counts the numbers read from tensors, for each of which a device would be waited for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
