"""The controller's part of a weight sync alone: a registry of engines, without any run."""

import sys

import ray

from async_grpo.config.roles import GENERATION, role_of
from async_grpo.controller.registry import WorkerRegistry


class RegistryActor:
    """Answers the calls of a controller that concern engines and their weights."""

    def __init__(self, **options):
        self.options, self.registry = options, None

    async def register(self, info, handle):
        self.registry = self.registry or WorkerRegistry(role_of(GENERATION), **self.options)
        await self.registry.register(info, handle)

    async def publish(self, snapshot, roles, timeout_s):
        return {GENERATION: await self.registry.publish(snapshot, timeout_s=timeout_s)}

    async def receivers(self, role):
        return tuple((member.info, member.handle) for member in self.registry.members)


class RegistryClient:
    """Called as a run's client is."""

    def __init__(self, **options):
        # Workers do not find the tests' modules by name.
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        actor = ray.remote(RegistryActor).options(num_cpus=0, max_concurrency=1000)
        self.actor = actor.remote(**options)

    def register(self, info, handle):
        return self.actor.register.remote(info, handle)

    def publish(self, snapshot, roles, timeout_s):
        return self.actor.publish.remote(snapshot, roles, timeout_s)

    def receivers(self, role):
        return self.actor.receivers.remote(role)
