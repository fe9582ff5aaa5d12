"""Speaks as `verifiers_bridge.py` does, of tasks that say what happens."""

import glob
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request


def ask(asked, path, **body):
    headers = {"Authorization": "Bearer " + os.environ["ASYNC_GRPO_SESSION_API_KEY"]}
    headers["X-Session-ID"] = asked["session"]
    url = asked["base_url"].removesuffix("/v1") + path
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        return json.load(urllib.request.urlopen(request))["choices"][0]
    except urllib.error.HTTPError as error:
        raise RuntimeError(json.load(error)["error"]["code"]) from error


def chat(asked, messages):
    return ask(asked, "/v1/chat/completions", model="policy", messages=messages)["message"]


def play_tokens(asked):
    ids = list(asked["task"]["token_ids"])
    for number in range(asked["task"]["turns"]):
        ids += ask(asked, "/inference/v1/generate", token_ids=ids, sampling_params={})["token_ids"]
        ids.append(number)
    return {"reward": float(sum(ids))}


def play(asked):
    task = asked["task"]
    messages = [{"role": "user", "content": task.get("prompt")}]
    try:
        if "token_ids" in task:
            return play_tokens(asked)
        for _ in range(task.get("turns", 1)):
            messages += [chat(asked, messages), {"role": "user", "content": "Sure?"}]
            if task.get("deaths", 0) > len(glob.glob(task.get("grave", "") + "*")):
                open(f"{task['grave']}{os.getpid()}", "w").close()
                sys.stderr.write("no memory left\n")
                os._exit(3)
            time.sleep(task.get("sleeps", 0))
    except RuntimeError as error:
        return {"errors": [["ProviderError", str(error)]]}
    if "error" in task:
        return {"errors": [[task["error"], "as was asked"]]}
    return {"reward": float(messages[-2]["content"] == task["answer"])}


def answer(asked, answers):
    said = {"id": asked["id"], **play(asked)}
    answers.write(json.dumps(said) + "\n")
    answers.flush()


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("what is printed is no answer")
    answers.write('{"ready": true}\n')
    answers.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        if not asked.get("cancel"):
            threading.Thread(target=answer, args=[asked, answers], daemon=True).start()


if __name__ == "__main__":
    main()
