/* A page of a run that goes on: it asks its server, on this machine, for what is new. */

const FOLLOW_MS = 3000;

async function answered(name) {
  const answer = await fetch(name);
  if (!answer.ok) throw new Error((await answer.text()) || "it has changed meanwhile");
  return answer;
}

async function follow() {
  el("live").hidden = false;
  el("live").addEventListener("click", () => setFollowing(!page.isFollowing));
  setFollowing(true);
  for (;;) {
    await new Promise((done) => setTimeout(done, FOLLOW_MS));
    if (page.isFollowing && !document.hidden) await lookForNews();
  }
}

function setFollowing(isFollowing) {
  page.isFollowing = isFollowing;
  el("live").setAttribute("aria-pressed", String(isFollowing));
  el("live").textContent = isFollowing ? "● live" : "paused";
}

async function lookForNews() {
  try {
    const version = await (await answered("version")).text();
    if (version !== page.version) await readNews(version);
    el("live").textContent = page.isFollowing ? "● live" : "paused";
    el("live").title = "read what the run writes, or stand still (f)";
  } catch (error) {
    el("live").textContent = "○ not live";
    el("live").title = `${visible(error.message)}: is async-grpo rollouts --follow still there?`;
  }
}

/* The same filters, order and sample with the data as it is now. */
async function readNews(version) {
  const scroll = el("scroll"), before = page.header, top = Math.floor(scroll.scrollTop / ROW_PX), first = items()[top];
  await readData();
  page.version = version;
  if (page.header.generation !== before.generation) Object.assign(page, { chosen: -1, held: -1 });
  page.blocks.clear();
  page.ranks.clear();
  page.every = page.whole = page.bins = page.lastStep = null;
  fillFilters();
  listAlarms();
  const extra = page.header.num_samples - before.num_samples, { hits } = page.search;
  if (hits && extra) page.search.hits = Uint8Array.from({ length: page.header.num_samples }, (_, i) => hits[i] ?? 0);
  applyFilters({ staysPut: true });
  if (top && page.view === "samples") {
    scroll.scrollTop += (Math.max(page.order.indexOf(first), 0) - top) * ROW_PX;
    drawList();
  }
  if (page.search.wanted) await searchOutputs({ isAgain: true });
}
