"""Episodes chat from many threads, and transformers cannot be imported by two at once."""

import threading
import time

from async_grpo.environments.chat import find


def test_threads_that_chat_at_once_load_a_tokenizer_one_after_another(monkeypatch):
    inside, seen = [], []

    def load(model):
        inside.append(model)
        seen.append(len(inside))
        time.sleep(0.02)
        inside.pop()
        return model

    monkeypatch.setattr(find, "_tokenizer", load)
    threads = [threading.Thread(target=find.find_tokenizer, args=("m",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1] * 8
