"""A cluster for tests without Ray: what a call returns is its own answer."""

from types import SimpleNamespace

import numpy as np

from async_grpo.cluster.handles import ControllerClient, RunClient
from async_grpo.types import RunId

PENDING = object()  # the answer of a call that is never answered
RUN = RunId(7, 1)


class FakeCluster:
    """One node; an answer that is an error is raised, and PENDING never comes.

    `actor(Kind).remote(...)` is what `Kind=...` of `actors` makes of its arguments; nothing, where
    it was not named.
    """

    def __init__(self, *, logs="", named=None, **actors):
        self.logs, self.named, self.actors = str(logs), named or {}, actors
        self.resources, self.free = {"CPU": 4.0}, {"CPU": 4.0}
        self.pid = 77
        self.waited, self.ended, self.options = [], [], {}

    def wait(self, call, *, timeout_s, who):
        self.waited.append((who, timeout_s))
        assert call is not PENDING
        if isinstance(call, Exception):
            raise call
        return call

    def is_ready(self, call, *, within_s=0.0):
        return call is not PENDING

    def wait_for_all(self, calls, *, timeout_s):
        pass

    def fetch(self, references, *, timeout_s, owner):
        return list(references)

    def actor(self, kind, **options):
        self.options = options
        return SimpleNamespace(remote=self.actors.get(kind.__name__, lambda *_, **__: None))

    def end(self, handle):
        self.ended.append(handle)

    def find_actor(self, name):
        return self.named.get(name)

    def on_head_node(self):
        return "head"

    def resources_here(self):
        return self.resources

    def free_here(self):
        return self.free

    def process_of(self, handle):
        return self.pid

    def is_here(self, node_id):
        return node_id == "here"

    def logs_folder(self):
        return self.logs

    def endpoints(self):
        return ()

    def head_address(self):
        return "127.0.0.1:7"

    def metrics_url(self):
        return "http://127.0.0.1:8/metrics"

    def put_bytes(self, data):
        return np.copy(data)

    def export_reference(self, reference):
        return reference

    def import_reference(self, exported):
        return exported


class FakeActor:
    """A handle whose calls are kept, and answered by the methods of `actor` or by `answers`."""

    def __init__(self, actor=None, **answers):
        self.actor, self.answers, self.calls = actor, answers, []

    def __getattr__(self, method):
        def remote(*arguments, **options):
            self.calls.append((method, *arguments))
            answer = self.answers.get(method, getattr(self.actor, method, None))
            return answer(*arguments, **options) if callable(answer) else answer

        return SimpleNamespace(remote=remote)


def client_of(controller, cluster=None, *, run=RUN):
    """A run's way to an object with the controller's methods, which that names first."""
    return RunClient(cluster or FakeCluster(), FakeActor(controller), run)


def controller_client(controller=None, **answers):
    return ControllerClient(FakeCluster(), FakeActor(controller, **answers))
