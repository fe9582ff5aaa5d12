"""The page as a reader has it: in a browser, from a file."""

import json

import chromium
import pytest
from rollouts_pages import held_out, sample, write, write_dump
from test_follow import append, serving
from test_rollouts_page import HOSTILE
from test_token_weights import trained_run

from async_grpo.telemetry.sample_dump import SampleDump

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium: apt-get install chromium"),
]
NUM_SAMPLES = 100_000
FIND = "document.querySelector"


def filtered(**fields):
    """The fastest of eight: other processes of the machine are not the page's."""
    sort = json.dumps({"by": fields.pop("sort", ""), "isFalling": fields.pop("falling", False)})
    values = "".join(f"el({json.dumps(k)}).value = {json.dumps(v)};" for k, v in fields.items())
    values += f"page.sorts.samples = {sort};"
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


def test_a_hundred_thousand_samples_open_in_three_seconds_filter_in_300_ms_and_are_searched(large):
    async def scene(tab):
        found = {"ready": tab.ready_s}
        for name, fields in {
            "text": {"question": "question 17 "},
            "reward": {"question": "", "reward-from": 1},
            "sort": {"reward-from": "", "sort": "reward", "falling": True},
            "type": {"fate": "1", "dataset_type": "0", "sort": "question"},
        }.items():
            found[name] = await tab.run(filtered(**fields))
        await tab.run("el('filters').reset(); await new Promise((done) => setTimeout(done, 100))")
        searched = {}
        for text in ("length an answer", "of some width"):
            await tab.run(f"el('output').value = {text!r}; await searchOutputs()")
            searched[text] = await tab.run("return [page.order.length, page.search.ms]")
        await tab.run("el('output').value = ''; await searchOutputs(); lookAt('questions')")
        found["questions"] = await tab.run(
            "const began = performance.now(); order();"
            "return [page.questions.length, performance.now() - began]"
        )
        await tab.run("page.sorts.samples.by = ''; lookAt('samples')")
        found["chosen"] = await tab.run("await choose(54321); return el('sample').textContent")
        return found, searched, tab.requests, tab.problems

    found, searched, requests, problems = chromium.visit(large, scene)
    assert (requests, problems) == ([f"file://{large}"], [])
    assert found.pop("ready") < 3
    assert "slot 6790, member 1" in found.pop("chosen")
    counts = {name: count for name, (count, _) in found.items()}
    assert counts == {
        "text": 24,  # 12,500 groups of 8: those of 17, 5,017 and 10,017
        "reward": 12_500,
        "sort": NUM_SAMPLES,
        "type": 6250,
        "questions": 5000,
    }
    assert max(ms for _, ms in found.values()) < 300
    assert [number for number, _ in searched.values()] == [NUM_SAMPLES, 0]
    assert max(ms for _, ms in searched.values()) < 8000


def test_outputs_are_searched_by_typing_and_what_is_found_is_marked(tmp_path):
    outputs = ["An Answer", 'with "quotes" \\ slashes', "Größe\tund", "turned <b>over</b>"]
    lines = [sample(n, output=output, input="an answer?") for n, output in enumerate(outputs)]
    turns = [
        {"role": "environment", "row": 0, "text": "Größe", "num_tokens": 1},
        {"role": "model", "row": 0, "text": "said early", "num_tokens": 1},
        {"role": "model", "row": 0, "text": "last", "num_tokens": 1},
    ]
    lines.append(sample(9, output="last", turns=turns))
    searches = {"an answer": [0], 'h "QUOTES" \\ s': [1], "GRÖSSE": [], "größe": [2],
                "<b>": [3], "said early": [9], "nothing": []}  # fmt: skip

    async def scene(tab):
        found = {}
        for text in searches:
            await tab.run(f"el('output').value = {json.dumps(text)}; await searchOutputs()")
            found[text] = await tab.run(
                "return [...page.order].map((i) => page.columns.ordinal[i])"
            )
        await tab.run("el('output').value = ''; await searchOutputs(); el('scroll').focus()")
        for key in ("o", *"OVER"):
            await tab.press(key)
        await tab.run("await new Promise((done) => setTimeout(done, 400)); await choose(0)")
        marked = "return [...CSS.highlights.get('found')].map(String)"
        return found, await tab.run(marked), tab.problems

    page = write(write_dump(tmp_path, lines))
    assert chromium.visit(page, scene) == (searches, ["over"], [])


def test_heads_sort_and_bars_and_alarms_of_the_curves_tell(tmp_path):
    rewards = [0.0, 0.5, 1.0]
    lines = [sample(n, k, reward=rewards[(n + k) % 3]) for n in range(40) for k in range(2)]
    folder = write_dump(tmp_path, lines)
    events = [(3, "no_signal", "raised"), (8, "no_signal", "cleared"), (12, "<b>x", "raised")]
    with (folder / "alarms.jsonl").open("w") as file:
        for step, alarm, event in events:
            told = {"step": step, "alarm": alarm, "event": event, "sentence": "<i>so</i>"}
            file.write(json.dumps(told) + "\n")

    async def scene(tab):
        click = f"{FIND}('#columns-head .reward').click(); return page.order[0]"
        firsts = [await tab.run(click) for _ in range(3)]
        alarms = await tab.run("return [el('alarms').textContent, page.alarms.map((a) => a.to)]")
        num_grounds = await tab.run(f"return {FIND}All('svg .alarm').length")
        await tab.run(f"{FIND}All('.field')[1].dispatchEvent(new Event('click'))")
        chosen = await tab.run("return [...page.order].map((i) => page.columns.reward[i])")
        return firsts, alarms, num_grounds, chosen, tab.problems

    firsts, (told, ends), num_grounds, chosen, problems = chromium.visit(write(folder), scene)
    assert [lines[first]["reward"] for first in firsts] == [1.0, 0.0, 0.0]
    assert told == (
        "2 alarms, 1 still holding at the endno signal from step 3 to 8: <i>so</i>"
        "<b>x from step 12 on: <i>so</i>"
    )
    assert (ends, num_grounds) == ([8, None], 4)  # two of each curve; JSON has no infinity
    assert set(chosen) == {0.5} and len(chosen) == 27
    assert problems == []


def test_a_followed_page_shows_what_a_run_writes_and_keeps_what_its_reader_chose(tmp_path):
    lines = [sample(n, k, output=f"answer {n}") for n in range(60) for k in range(2)]
    folder = write_dump(tmp_path, lines[:20])
    look = "await lookForNews(); return [page.header.num_samples, page.order.length]"

    async def scene(tab):
        await tab.run(
            "el('fate').value = 0; el('output').value = 'answer 7'; await searchOutputs()"
        )
        await tab.run("await choose(0)")
        seen = [await tab.run("return [page.header.num_samples, page.order.length]")]
        append(folder / "samples.jsonl", [*lines[20:], sample(60, output="Answer 7 again")])
        seen.append(await tab.run(look))
        kept = await tab.run("return [page.at, el('fate').value, el('sample').textContent]")
        append(folder / "alarms.jsonl", [
            {"step": 2, "alarm": "no_signal", "event": "raised", "sentence": "so"}
        ])  # fmt: skip
        await tab.run(look)
        alarms = await tab.run(f"return {FIND}All('svg .alarm').length")
        SampleDump(folder / "samples.jsonl").cut_back(5)
        seen.append(await tab.run(look))
        await tab.run("el('output').value = ''; await searchOutputs(); await choose(0)")
        newest = await tab.run(f"return {FIND}('#sample h2').textContent")
        polls = len([url for url in tab.requests if url.endswith("/version")])
        await tab.run("await new Promise((done) => setTimeout(done, FOLLOW_MS + 500))")
        has_asked = len([url for url in tab.requests if url.endswith("/version")]) > polls
        await tab.press("f")
        state = await tab.run("return el('live').textContent")
        return seen, kept, alarms, newest, has_asked, state, tab

    with serving(folder) as server:
        told = chromium.visit(server.address, scene)
    seen, (at, fate, shown), alarms, newest, has_asked, state, tab = told
    assert seen == [[20, 2], [121, 3], [10, 0]]
    assert (at, fate) == (1, "0")  # the newest stand on top
    assert shown.startswith("Step 4, slot 7, member 1")
    assert (alarms, newest, has_asked, state) == (2, "Step 3, slot 4, member 1", True, "paused")
    assert tab.problems == []
    assert {url.rpartition("/")[0] + "/" for url in tab.requests} == {server.address}


def test_held_out_answers_are_listed_and_have_a_curve_of_their_own(tmp_path):
    lines = [sample(n, reward=0.25) for n in range(8)]
    evaluated = [held_out(b, n, k, reward=b / 4) for b in (0, 2, 4) for n in (0, 1) for k in (0, 1)]
    page = write(write_dump(tmp_path, lines, evaluated=evaluated))

    async def scene(tab):
        curves = await tab.run(f"return {FIND}All('.curve.held-out').length")
        trained = await tab.run("return page.whole.get('reward').map((point) => point[1])")
        await tab.run("el('set').value = 1; applyFilters(); await choose(5)")
        listed = await tab.run("return [page.order.length, el('sample').textContent]")
        group = await tab.run(f"return {FIND}All('#sample .group button').length")
        return curves, trained, *listed, group, await tab.run("return location.hash"), tab.problems

    curves, trained, listed, told, group, address, problems = chromium.visit(page, scene)
    assert (curves, trained) == (2, [0.25] * 4)
    assert (listed, group) == (12, 2)
    assert told.startswith("After step 2, held-out question 0, member 1")

    async def reopened(tab):
        head = f"{FIND}('#sample h2')"  # which the page shows once it has read the sample
        await tab.run(f"while (!{head}) await new Promise((done) => setTimeout(done, 20))")
        return await tab.run(f"return {head}.textContent")

    assert chromium.visit(f"{page}{address}", reopened) == told.partition("Formatted")[0]
    assert problems == []


def test_markdown_and_formulas_are_shown_and_what_a_text_says_is_never_an_attribute(tmp_path):
    output = (
        "# Head\n\n**so** $\\frac{a}{b}$ <b onclick=x>\n\n$\\left($\n\n```html\n<img src=x>\n```\n"
        "[a](javascript:alert(1)) \\boxed{7} $\\href{javascript:x}{y}$"
    )

    async def scene(tab):
        await tab.run("await choose(0)")
        await tab.press("m")
        await tab.run("await new Promise((done) => setTimeout(done, 100))")
        shown = f"{FIND}('.written .text')"
        names = f"return [...{shown}.querySelectorAll('*')].map((each) => each.localName)"
        attributes = (
            f"return [...{shown}.querySelectorAll('*')].flatMap((each) => each.getAttributeNames())"
        )
        boxes = f"const box = {shown}.querySelector('mfrac').getBoundingClientRect();"
        found = [await tab.run(names), await tab.run(attributes)]
        found.append(await tab.run(f"{boxes} return box.height > box.width"))
        await tab.press("m")
        await tab.run("await new Promise((done) => setTimeout(done, 100))")
        return *found, await tab.run(f"return {shown}.textContent"), tab.problems

    page = write(write_dump(tmp_path, [sample(0, output=output)]))
    names, attributes, is_drawn, plain, problems = chromium.visit(page, scene)
    assert {"h4", "strong", "mfrac", "pre", "code"} <= set(names)
    assert not {"b", "img", "a"} & set(names)
    assert set(attributes) <= {"class", "stretchy", "fence"}
    assert is_drawn
    assert (plain, problems) == (output, [])


def test_two_samples_stand_side_by_side_with_what_differs_marked(tmp_path):
    lines = [
        sample(0, 0, output="the sum is 5"), sample(0, 1, output="the sum is 17"),
        sample(1, 0, output="other"),
    ]  # fmt: skip

    async def scene(tab):
        await tab.run("el('scroll').focus(); await choose(0)")
        await tab.press("c")
        marks = f"return [...{FIND}All('mark')].map((mark) => mark.textContent)"
        heads = f"return [...{FIND}All('#sample h3')].map((head) => head.firstChild.textContent)"
        seen = []
        for at in (1, 2):
            await tab.run(f"await choose({at})")
            seen.append([await tab.run(marks), await tab.run(heads)])
        await tab.press("c")
        await tab.run("await new Promise((done) => setTimeout(done, 100))")
        alone = await tab.run(f"return {FIND}('#sample h2').textContent")
        return seen, alone, tab.problems

    seen, alone, problems = chromium.visit(write(write_dump(tmp_path, lines)), scene)
    assert seen == [
        [["5", "17"], ["question of both", "written", "written"]],
        [["0", "1", "the sum is 5", "other"], ["question", "question", "written", "written"]],
    ]
    assert (alone, problems) == ("Step 1, slot 1, member 0", [])


def test_questions_have_their_solve_rate_at_each_step(tmp_path):
    lines = [
        sample(ordinal, index, input=f"question {ordinal % 2}", reward=float(reward))
        for ordinal, group in enumerate([(0, 0), (1, 0), (0, 1), (1, 1), (1, 1), (0, 0)])
        for index, reward in enumerate(group)
    ]
    # A reference answer is listed, in no curve and in no rate.
    lines.append(sample(5, 2, input="question 1", given=True, advantage=None, num_output_tokens=0))

    async def scene(tab):
        curve = await tab.run(
            "return means(page.every.filter((i) => !isGiven(i)), page.columns.reward)"
        )
        assert (
            curve[-1] == [3, 0.5, 4]
            and await tab.run("return page.whole.get('reward').at(-1)") == curve[-1]
        )
        await tab.press("q")
        of_each = "return page.questions.map((row) => [row.samples, row.points, row.change])"
        rows = await tab.run(of_each)
        await tab.run("sortBy('change'); await choose(1)")
        told = await tab.run("return el('sample').textContent")
        await tab.run(f"{FIND}('#sample .group button').click()")
        await tab.run("await new Promise((done) => setTimeout(done, 100))")
        opened = await tab.run(f"return {FIND}('#sample h2').textContent")
        await tab.run("await openQuestion(page.chosen)")
        again = await tab.run(f"return [page.view, {FIND}('#sample h2').textContent]")
        await tab.run("el('solved').value = '2'; applyFilters()")
        none = await tab.run("return page.questions.map((row) => row.solved)")
        return rows, told, opened, again, none, tab.problems

    rows, told, opened, again, none, problems = chromium.visit(
        write(write_dump(tmp_path, lines)), scene
    )
    assert rows == [
        [6, [[1, 0, 2], [2, 0.5, 2], [3, 1, 2]], 1],
        [7, [[1, 0.5, 2], [2, 1, 2], [3, 0, 2]], -0.5],
    ]
    assert "Solved50 % of 7 samples" in told and "question 1" in told
    assert opened == "Step 3, slot 5, member 0"
    assert again == ["questions", "A question asked in 3 steps"]
    assert none == [0, 0]
    assert problems == []


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
        await tab.run("await choose(0); hold()")
        for number in range(1, len(HOSTILE)):
            await tab.run(f"await choose({number})")
            sides = f"return [...{FIND}All('.pair .written .text')].map((text) => text.textContent)"
            assert await tab.run(sides) == [shown[0], shown[number]] * 2
        await tab.run("format()")
        await tab.run("await new Promise((done) => setTimeout(done, 100)); hold()")
        for number in range(len(HOSTILE)):
            await tab.run(f"await choose({number})")
            assert await tab.run(f"return {FIND}All('.formatted').length") == 4
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


def test_an_advantage_is_explained_by_the_rewards_that_its_baseline_knew(tmp_path):
    lines = [
        sample(0, 0, reward=1.0, advantage=1 / 3),
        sample(0, 1, reward=0.0, advantage=-2 / 3),
        sample(0, 2, reward=0.0, advantage=0.0, fate="discarded"),  # by its length
        sample(0, 3, reward=1.0, advantage=None, fate="statistics", given=True),
    ]

    async def scene(tab):
        own = "{ advantage: page.columns.advantage[0] }"
        return await tab.run(f"return advantageInWords(0, {{}}, {own})")

    page = write(write_dump(tmp_path, lines, advantage="dr"))
    name, formula, rewards = chromium.visit(page, scene)
    assert (name, rewards) == ("Advantage", "rewards of the group: 1, 0, 1")
    assert formula.startswith("A = r − mean = (1 − 0.66667) = 0.333333")


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
