"use strict";
/* Draws the content of /status.json. Everything from there is inserted as text, never as HTML. */

const EVERY_MS = 2000, PATIENCE_MS = 6000, MOST_SHOWN = 40, MOST_EVENTS = 30;
// Uploads are stalled if an attempt failed within LATELY_S and no byte has moved for STALLED_S.
const LATELY_S = 60, STALLED_S = 8;
const STATES = {
  open: "being written", uploading: "uploading", queued: "queued", waiting: "waiting", lost: "lost",
  superseded: "given up for a newer one", committed: "committed", aborted: "given up", pruned: "pruned",
  pruning: "being pruned", damaged: "damaged", stalled: "stalled", in_flight: "in flight",
};
let data = null, heardAt = 0, isLost = false, timer = 0;

// --- the document -------------------------------------------------------------------------------------------

function el(tag, { cls = "", ...attributes } = {}, ...children) {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children.flat().filter((each) => each !== null && each !== "" && each !== undefined));
  return node;
}

/* Make `old` equal to `fresh` with as few changes as possible, so that selection and scroll position survive. */
function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return undefined;
  }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  fill(old, [...fresh.childNodes]);
  return undefined;
}

function fill(parent, fresh) {
  const old = [...parent.childNodes];
  fresh.forEach((each, at) => (at < old.length ? morph(old[at], each) : parent.append(each)));
  old.slice(fresh.length).forEach((each) => each.remove());
}

// --- human-readable numbers ---------------------------------------------------------------------------------

const now = () => data.now + (performance.now() - heardAt) / 1000;

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (bytes >= 1024 && at < units.length - 1) { bytes /= 1024; at += 1; }
  return `${at ? bytes.toFixed(bytes < 100 ? 1 : 0) : Math.round(bytes)} ${units[at]}`;
}

function span(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  if (s < 120) return `${s} s`;
  if (s < 7200) return `${Math.floor(s / 60)} min`;
  return s < 172800 ? `${Math.floor(s / 3600)} h` : `${Math.floor(s / 86400)} days`;
}

const ago = (at) => (at ? `${span(now() - at)} ago` : "");
const few = (list, most = 8) => list.slice(0, most).join(", ") + (list.length > most ? " …" : "");
const some = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const dots = (...parts) => parts.filter(Boolean).join(" · ");
const ranksOf = (list) => `rank${list.length > 1 ? "s" : ""} ${few(list)}`;

// --- one run ------------------------------------------------------------------------------------------------

function stateOf(each) {
  if (each.is_damaged) return "damaged";
  if (each.state === "in_flight") return "waiting";
  if (each.state === "pruning") return "pruned";
  if ((each.state === "uploading" || each.state === "open") && !each.uploaded_bytes && !each.bytes_per_s) return "queued";
  if (each.state !== "open" && each.state !== "uploading") return each.state;
  return each.is_stalled ? "stalled" : "uploading";
}

function detailOf(each, state) {
  if (state === "uploading" || state === "stalled" || state === "queued") {
    const done = each.percent === undefined ? "" : `${each.percent} % of ${size(each.size_bytes)}`;
    const speed = each.bytes_per_s ? `${size(each.bytes_per_s)}/s` : "";
    const left = each.eta_s ? `${span(each.eta_s + 0.5)} left` : "";
    return dots(state === "queued" ? size(each.size_bytes) : done, speed, left, each.state === "open" ? "not sealed yet" : "");
  }
  if (state === "waiting") {
    const missing = each.missing_ranks || [], ranks = each.world_size;
    if (each.state === "in_flight")
      return dots(`${each.ranks.length} of ${ranks === null ? "?" : ranks} ranks have delivered`, missing.length ? `waits for ${ranksOf(missing)}` : "",
        each.size_bytes ? `${size(each.size_bytes)} there` : "", each.changed_at ? `last change ${ago(each.changed_at)}` : "");
    return dots(missing.length ? `waits for ${ranksOf(missing)}` : "this node has delivered its part");
  }
  return dots(ago(each.decided_at), each.size_bytes ? size(each.size_bytes) : "", each.is_pinned ? "pinned" : "");
}

function checkpoint(each) {
  const state = stateOf(each);
  const failure = each.is_damaged ? "a reader could not read it as it was committed" : each.failure || "";
  const isCalm = state === "pruned" || state === "waiting";
  const usual = `step-${each.step}`;
  return el("li", { cls: state },
    el("div", { cls: "row" },
      el("div", {}, el("b", {}, `Step ${each.step}`), each.name && each.name !== usual ? el("span", {}, each.name) : null),
      el("span", { cls: "state" }, state === "uploading" && each.state === "open" ? STATES.open : STATES[each.state === "pruning" ? "pruning" : state] || state)),
    (state === "uploading" || state === "stalled") && each.percent !== undefined
      ? el("progress", { max: 100, value: each.percent, "aria-label": `Step ${each.step}, uploaded` }) : null,
    el("p", { cls: "detail" }, detailOf(each, state)),
    failure ? el("p", { cls: isCalm ? "detail" : "failure" }, failure) : null,
    each.hint ? el("p", { cls: "detail" }, each.hint) : null);
}

const byAge = (one, two) => two.generation - one.generation || two.step - one.step;

function timeline(all, title = "Checkpoints") {
  const shown = [...all].sort(byAge).slice(0, MOST_SHOWN);
  if (!shown.length) return [];
  const more = all.length - shown.length;
  return [el("h3", {}, title), el("ol", { cls: "line" }, shown.map(checkpoint)),
    more > 0 ? el("p", { cls: "detail" }, `and ${some(more, "older one")}`) : null];
}

/* Return why uploads are stalled, or "". */
function stall(run, kind) {
  if (run.idle_s === null || run.idle_s < STALLED_S) return "";
  const failed = (data.events || []).find((each) => each.what.startsWith("attempt") && (each.kind || "") === kind && now() - each.at < LATELY_S);
  return failed ? `Uploads are failing: ${failed.text.split(";")[0]} ${ago(failed.at)}. They will be retried.` : "";
}

function headline(run, isStalled) {
  const last = run.last_committed, steps = run.would_lose.steps;
  const back = last ? `training would go back to step ${last.step}` : "there is no committed checkpoint to go back to";
  if (steps.length)
    return [isStalled ? "warn" : "", `${steps.length > 1 ? "Steps" : "Step"} ${few(steps, 4)} would be lost`,
      `If this node died now, ${back}.`];
  const waiting = run.checkpoints.filter((each) => each.state === "waiting");
  if (waiting.length)
    return ["good", "Nothing on this node would be lost", `Step ${waiting.at(-1).step} is uploaded and waits for other ranks.`];
  if (last) return ["good", "Nothing would be lost", `Step ${last.step} is committed, and nothing is waiting for upload.`];
  return ["", "Nothing is saved yet", "No checkpoint was handed over."];
}

function tile(name, value, more) {
  return el("div", {}, el("dt", {}, name), el("dd", {}, value, more ? el("small", {}, more) : null));
}

function tiles(run, engine, isStalled) {
  const last = run.last_committed;
  const files = Object.values(run.queue).reduce((sum, each) => sum + each.shards, 0);
  const stopped = run.ranks.filter((each) => !each.is_running).map((each) => each.rank);
  const retries = Object.entries(engine ? engine.attempt_failures : {});
  const count = retries.reduce((sum, each) => sum + each[1], 0);
  const left = run.eta_s ? `${span(run.eta_s + 0.5)} left` : "";
  const busy = isStalled ? "stalled" : run.bytes_per_s ? `${size(run.bytes_per_s)}/s` : files ? "under way" : "idle";
  return el("dl", { cls: "tiles" },
    tile("Last commit", last ? `Step ${last.step}` : "none yet", last ? ago(last.committed_at) : ""),
    tile("Would be lost", run.would_lose.steps.length ? size(run.would_lose.size_bytes) : "nothing",
      run.would_lose.steps.length ? some(run.would_lose.steps.length, "checkpoint") : ""),
    tile("Upload", busy, dots(files ? some(files, "file") : "", isStalled ? "" : left)),
    engine
      ? tile("Retries", count ? String(count) : "none", few(retries.map(([why, times]) => `${why} ${times}`), 3))
      : tile("Ranks", String(run.ranks.length), stopped.length ? `${ranksOf(stopped)} stopped` : "running"));
}

function refusals(engine) {
  const found = Object.entries(engine ? engine.refused : {});
  const count = found.reduce((sum, each) => sum + each[1], 0);
  return count ? el("p", { cls: "failure" },
    `${count} refused by the watcher, and not in the store (${few(found.map(([why, times]) => `${why.replace("_", " ")} ${times}`), 3)}). The events below name them.`) : null;
}

function run(folder, kind, found, engine) {
  const stalled = stall(found, kind), remote = found.remote || "", [mood, title, sub] = headline(found, stalled);
  const known = new Set(found.checkpoints.map((each) => `${each.generation}/${each.step}`));
  const earlier = (engine ? engine.earlier : []).filter((each) => !known.has(`${each.generation}/${each.step}`));
  const stopped = found.ranks.filter((each) => !each.is_running).map((each) => each.rank);
  return el("section", { cls: "card" },
    el("div", { cls: "run" },
      el("h2", {}, remote.replace(/\/+$/, "").split("/").at(-1) || folder),
      kind ? el("span", { cls: "badge" }, kind) : null,
      el("span", { cls: "path" }, data.folders.length > 1 ? folder : remote)),
    el("p", { cls: `headline ${mood}` }, title), el("p", { cls: "sub" }, sub),
    stopped.length && found.would_lose.steps.length
      ? el("p", { cls: "failure" }, `No uploader is running for ${ranksOf(stopped)}: ckpt-async drain finishes what was sealed.`) : null,
    stalled ? el("p", { cls: "failure" }, stalled) : null,
    (engine ? engine.untold : []).filter((each) => each.attempts).map((each) => el("p", { cls: "failure" },
      `${some(each.waiting, "event")} not delivered to the ${each.sink}, in ${some(each.attempts, "attempt")} since ${span(now() - each.oldest_at)}. They will be retried.`)),
    refusals(engine),
    tiles(found, engine, stalled),
    timeline([...found.checkpoints.map((each) => (stalled ? { ...each, is_stalled: true, bytes_per_s: null, eta_s: null } : each)), ...earlier]));
}

function folder(each) {
  if (each.error)
    return [el("section", { cls: "card" }, el("div", { cls: "run" }, el("h2", {}, each.folder)), el("p", { cls: "failure" }, each.error))];
  const engines = new Map((data.engines || []).map((engine) => [engine.kind || "", engine]));
  const runs = [["", each], ...Object.entries(each.kinds)].filter(([, found]) => found.ranks.length || found.checkpoints.length);
  const shown = runs.length ? runs : [["", each]];
  return shown.map(([kind, found]) => run(each.folder, kind, found, engines.get(kind)));
}

function remote(each) {
  const newest = each.last_committed;
  return el("section", { cls: "card" },
    el("div", { cls: "run" }, el("h2", {}, each.remote.replace(/\/+$/, "").split("/").at(-1)), el("span", { cls: "path" }, each.remote)),
    el("p", { cls: `headline ${newest ? "good" : ""}` }, newest ? `Step ${newest.step} is the newest checkpoint` : "Nothing is committed yet"),
    el("p", { cls: "sub" }, dots(newest ? `committed ${ago(newest.decided_at)}` : "", each.seen_at ? `checked ${ago(each.seen_at)}` : "", each.world_size ? some(each.world_size, "rank") : "")),
    each.error ? el("p", { cls: "failure" }, each.error) : null,
    timeline(each.checkpoints, "In the store"));
}

function sweep(each) {
  if (each === undefined) return null;
  const title = each === null ? "The first sweep is under way" : each.is_clean ? `Swept ${ago(each.completed_at)}` : `Swept ${ago(each.completed_at)}, with failures`;
  return el("section", { cls: "card" }, el("p", { cls: `headline ${each && !each.is_clean ? "warn" : ""}` }, title),
    each && each.failing.length ? el("p", { cls: "sub" }, `failing: ${few(each.failing, 20)}`) : null);
}

function events(list) {
  if (!list.length) return null;
  return el("section", { cls: "card" }, el("h3", {}, "Recent events"),
    el("ol", { cls: "events" }, list.slice(0, MOST_EVENTS).map((each) =>
      el("li", {}, el("time", {}, ago(each.at)),
        el("span", { cls: each.level },
          each.step === null || each.step === undefined ? null : el("b", {}, `Step ${each.step} `),
          each.text, each.count > 1 ? ` (${each.count} times)` : "", each.kind ? ` · ${each.kind}` : "")))));
}

// --- the whole page -----------------------------------------------------------------------------------------

function draw() {
  const link = document.getElementById("link"), main = document.getElementById("main");
  const silent = (performance.now() - heardAt) / 1000;
  link.dataset.state = data === null ? (isLost ? "lost" : "wait") : isLost ? "lost" : "live";
  link.textContent = isLost ? "connection lost" : data === null ? "connecting" : "live";
  if (data === null) return;
  main.classList.toggle("lost", isLost);
  document.getElementById("where").textContent = dots(data.role, data.host);
  fill(main, [
    isLost ? el("p", { cls: "card alert" }, el("strong", {}, "No answer"),
      ` for ${span(silent)}. The process has ended, or cannot be reached; below is its last known state.`) : null,
    data.problem ? el("p", { cls: "card alert" }, el("strong", {}, "This uploader has stopped. "), data.problem) : null,
    sweep(data.sweep), ...(data.folders || []).flatMap(folder), ...(data.remotes || []).map(remote), events(data.events || []),
  ].filter(Boolean));
  fill(document.getElementById("foot"), [
    el("span", {}, `process ${data.pid}`), ...(data.folders || []).map((each) => el("span", {}, each.folder)),
    el("a", { href: "status.json" }, "status.json"), el("a", { href: "metrics" }, "metrics")]);
  const first = (data.folders || []).find((each) => !each.error && each.last_committed);
  const mark = isLost || data.problem ? "✕ " : "";
  document.title = `${mark}${first ? `step ${first.last_committed.step} · ` : ""}ckpt_async`;
}

async function refresh() {
  clearTimeout(timer);
  try {
    const reply = await fetch("status.json", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (!reply.ok) throw new Error(`status ${reply.status}`);
    data = await reply.json();
    heardAt = performance.now();
    isLost = false;
  } catch {
    isLost = true;
  }
  draw();
  if (!document.hidden) timer = setTimeout(refresh, EVERY_MS);
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
setInterval(() => { if (!document.hidden) draw(); }, 1000);
refresh();
