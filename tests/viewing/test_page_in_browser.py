"""The page as a reader has it: in a browser, from a file."""

import json

import chromium
import pytest
from rollouts_pages import sample, write, write_dump
from test_rollouts_page import HOSTILE
from test_token_weights import trained_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium: apt-get install chromium"),
]
NUM_SAMPLES = 100_000
FIND = "document.querySelector"


def filtered(**fields):
    """The fastest of eight: other processes of the machine are not the page's."""
    values = "".join(f"el({json.dumps(k)}).value = {json.dumps(v)};" for k, v in fields.items())
    return (
        f"{values} const ms = []; for (let k = 0; k < 8; k++) "
        "{ page.ranks.clear(); applyFilters(); ms.push(page.filterMs); }"
        "return [page.order.length, Math.min(...ms)]"
    )


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    lines = (
        sample(
            ordinal, index, input=f"question {ordinal % 5000} " + "and so on " * 20,
            output="an answer of some length " * 20, dataset_type=("math", "code")[ordinal % 2],
            fate=("trained", "zero_contribution")[index == 3], reward=float(ordinal % 7 == index),
        )
        for ordinal in range(NUM_SAMPLES // 8)
        for index in range(8)
    )  # fmt: skip
    return write(write_dump(tmp_path_factory.mktemp("large"), lines, batch_size=64))


def test_a_hundred_thousand_samples_open_in_three_seconds_and_filter_in_300_ms(large):
    async def scene(tab):
        found = {"ready": tab.ready_s}
        for name, fields in {
            "text": {"question": "question 17 "},
            "reward": {"question": "", "reward-from": 1},
            "sort": {"reward-from": "", "sort": "reward", "direction": "-1"},
            "type": {"fate": "1", "dataset_type": "0", "sort": "question"},
        }.items():
            found[name] = await tab.run(filtered(**fields))
        await tab.run("el('filters').reset(); await new Promise((done) => setTimeout(done, 100))")
        found["chosen"] = await tab.run("await choose(54321); return el('sample').textContent")
        return found, tab.requests, tab.problems

    found, requests, problems = chromium.visit(large, scene)
    assert (requests, problems) == ([f"file://{large}"], [])
    assert found.pop("ready") < 3
    assert "slot 6790, member 1" in found.pop("chosen")
    counts = {name: count for name, (count, _) in found.items()}
    assert counts == {
        "text": 24,  # 12,500 groups of 8: those of 17, 5,017 and 10,017
        "reward": 12_500,
        "sort": NUM_SAMPLES,
        "type": 6250,
    }
    assert max(ms for _, ms in found.values()) < 300


def test_hostile_texts_are_shown_and_run_nothing(tmp_path):
    lines = [
        sample(
            n, input=text, output=text, answer=text, reason=text, adapter=text, dataset_type=text,
            turns=[{"role": "environment", "row": 0, "text": text, "num_tokens": 3},
                   {"role": "model", "row": 0, "text": text, "num_tokens": 4, "worker": text}] * 2,
        )
        for n, text in enumerate(HOSTILE)
    ]  # fmt: skip

    async def scene(tab):
        shown = []
        for number in range(len(HOSTILE)):
            await tab.run(f"await choose({number})")
            shown.append(await tab.run(f"return {FIND}('.written .text').textContent"))
        num_elements = await tab.run(f"return {FIND}All('img, iframe, #sample script').length")
        return shown, num_elements, await tab.run("return document.title"), tab

    page = write(write_dump(tmp_path / "run", lines))
    shown, num_elements, title, tab = chromium.visit(page, scene)
    assert shown == [
        *HOSTILE[:2], "a⟨0000⟩b", "lone ⟨dc80⟩ surrogate", "⟨202e⟩right to left⟨2066⟩", HOSTILE[5],
    ]  # fmt: skip
    assert (num_elements, title, tab.problems) == (0, "run: rollouts", [])
    assert tab.requests == [f"file://{page}"]


def test_samples_are_chosen_and_searched_by_keyboard(tmp_path):
    lines = [sample(ordinal, index) for ordinal in range(30) for index in range(2)]

    async def scene(tab):
        await tab.run("el('scroll').focus()")
        places = []
        for key in ("ArrowDown", "ArrowDown", "End", "ArrowUp", "Home"):
            await tab.press(key)
            places.append(await tab.run("return page.at"))
        await tab.press("/")
        for letter in "question 7":
            await tab.press(letter)
        searched = await tab.run("return [document.activeElement.id, page.order.length]")
        await tab.run("showStep(1)")
        return places, searched, await tab.run("return page.order.length")

    page = write(write_dump(tmp_path, lines))
    assert chromium.visit(page, scene) == ([0, 1, 59, 58, 0], ["question", 2], 0)


def test_the_provenance_of_each_token_agrees_with_the_trainer(tmp_path):
    trained_run(tmp_path / "run", clip_low=0.1, clip_high=0.1)

    async def scene(tab):
        told = []
        for member in range(3):
            await tab.run(f"await choose({member})")
            told += await tab.run(
                "const told = []; for (const token of document.querySelectorAll('.token')) "
                "{ token.click(); told.push(el('provenance').textContent); } return told"
            )
        await tab.run(f"{FIND}('.token').focus()")
        for key in ("Enter", "ArrowRight", "ArrowRight", "ArrowLeft"):
            await tab.press(key)
        assert await tab.run(f"return {FIND}('[aria-current=true].token').at") == [0, 1]
        coloured = await tab.run(
            "el('colouring').value = 'weight'; el('colouring').dispatchEvent(new Event('change'));"
            "return [...document.querySelectorAll('.token')].map((t) => t.style.backgroundColor)"
        )
        return told, coloured, tab.problems

    told, coloured, problems = chromium.visit(write(tmp_path / "run"), scene)
    trained = [words for words in told if "the trainer's own was" in words]
    assert len(trained) >= 20
    assert all(": the same" in words and "by rank 3" in words for words in trained)
    assert all("4 samples of step 2" in words for words in trained)
    assert len(set(trained)) == len(trained)
    assert all("masked" in words for words in set(told) - set(trained))
    assert any(colour.startswith("rgb(var(--") for colour in coloured)
    assert problems == []
