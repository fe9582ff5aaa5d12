"""The controller's part of a weight sync alone: a registry of engines, without any run."""

import sys

import ray

from async_grpo.cluster.cluster import Cluster
from async_grpo.cluster.handles import RunClient
from async_grpo.config.roles import GENERATION, role_of
from async_grpo.controller.registry import WorkerRegistry
from async_grpo.types import RunId


class RegistryActor:
    """Answers the calls of a controller that concern engines and their weights."""

    def __init__(self, **options):
        self.options, self.registry = options, None

    async def register(self, info, handle):
        self.registry = self.registry or WorkerRegistry(role_of(GENERATION), **self.options)
        await self.registry.register(info, handle)

    async def publish(self, run, snapshot, roles, timeout_s):
        return {GENERATION: await self.registry.publish(snapshot, timeout_s=timeout_s)}

    async def receivers(self, role):
        return tuple((member.info, member.handle) for member in self.registry.members)


def registry_client(**options):
    """The way to it, as a run has one to its controller."""
    # Workers do not find the tests' modules by name.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    actor = ray.remote(RegistryActor).options(num_cpus=0, max_concurrency=1000)
    return RunClient(Cluster(), actor.remote(**options), RunId(0, 1))


def publish(client, snapshot, *, timeout_s):
    """Have engines load a snapshot, which whoever calls keeps; what came of it."""
    call = client.controller.publish.remote(client.run, snapshot, (GENERATION,), timeout_s)
    return client.wait(call, timeout_s=2 * timeout_s)[GENERATION]
