// The page: fetches the overview every two seconds and updates the shown parts in place.

import {barChart, clock, color, h, intervalAxis, intervalChart, timeChart} from "./chart.js";

const POLL_MS = 2000;
const PHASES = ["idle", "training", "judging", "publishing", "canary", "rolling"];
const RANGES = {"15 min": 900, "1 h": 3600, "6 h": 21600, "all": 0};
const TONES = {promote: "good", reject: "bad", inconclusive: "warn", swapped: "good", refused: "bad", unreachable: "warn", rolled_back: "bad"};

const $ = id => document.getElementById(id);
let range = decodeURIComponent(location.hash.slice(1)) in RANGES ? decodeURIComponent(location.hash.slice(1)) : "1 h";
let latest = null, heard_ms = 0, waiting = 0, turn = 0;

const version = text => text.replace(/^v0*(?=\d+$)/, "v");
const server = text => text.replace(/^https?:\/\//, "");
const number = (value, digits = 0) => value.toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits});
const signed = value => (value >= 0 ? "+" : "−") + number(Math.abs(value), 2);

function bytes(value) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (value >= size) return `${number(value / size, value < 10 * size ? 1 : 0)} ${unit}`;
  return `${value} B`;
}

function duration(seconds) {
  for (const [unit, size, from] of [["days", 86400, 172800], ["h", 3600, 5400], ["min", 60, 90]])
    if (seconds >= from) return `${Math.round(seconds / size)} ${unit}`;
  return `${number(seconds, seconds < 10 && seconds % 1 ? 1 : 0)} s`;
}

const none = text => h("p", {class: "none"}, text);
const badge = (text, tone = "") => h("span", {class: `badge ${tone}`}, text.replace("_", " "));

function when(time_s) {
  const old = latest.now_s - time_s > 72000;
  const day = new Date(time_s * 1000).toLocaleDateString([], {day: "numeric", month: "short"});
  return h("td", {class: "tight soft", title: new Date(time_s * 1000).toLocaleString()}, (old ? `${day} ` : "") + clock(time_s, true));
}

/** Redraw a place only if its value has changed since the last call. */
const shown = new Map();
function changed(place, value, draw) {
  const text = JSON.stringify(value);
  if (shown.get(place) === text) return;
  shown.set(place, text);
  draw();
}

function showAnswer({headline, state}) {
  changed("answer", headline, () => {
    const parts = [headline.before, headline.number && h("em", {class: headline.change ? "" : headline.tone}, headline.number),
      headline.after, headline.change && h("span", {class: headline.tone}, headline.change)];
    $("headline").replaceChildren(...parts.filter(Boolean).flatMap(part => [part, " "]));
    $("lead").textContent = headline.below;
    document.title = headline.number ? `${headline.number} · redraft` : "redraft";
  });
  changed("phases", state, () => {
    const phases = state?.phase === "halted" ? ["halted", ...PHASES] : PHASES;
    $("phases").replaceChildren(...phases.map(phase => {
      const now = phase === state?.phase;
      return h("li", {class: now ? `now ${phase}` : "", ...(now ? {"aria-current": "step"} : {})}, phase);
    }), ...(state?.reason ? [h("li", {class: "why"}, state.reason)] : []));
  });
}

function tile(name, value, note, {tone = "", meter = null} = {}) {
  const bar = meter === null ? null : h("div", {class: "meter"}, h("div", {class: meter > .95 ? "full" : ""}));
  if (bar) bar.firstChild.style.width = `${Math.min(100, 100 * meter)}%`;
  return h("div", {class: "tile"}, h("div", {class: "name"}, name), h("div", {class: `number ${tone}`}, value), h("div", {class: "note"}, note), bar);
}

function lagTile({lag_s, lag_records}) {
  if (!lag_records && !lag_s) return tile("Behind traffic", "0", "all records trained on");
  const waiting = `${number(lag_records)} records`;
  return lag_s === null ? tile("Behind traffic", waiting, "waiting for training") : tile("Behind traffic", duration(lag_s), `${waiting} waiting for training`, {tone: lag_s > 1800 ? "warn" : ""});
}

/** The served draft against itself at its promotion; an interval that holds 0 is no change. */
function stalenessTile(stale) {
  if (!stale) return tile("Since promotion", "–", "not compared with its promotion yet");
  const saved = stale.steps_saved ? `; ${number(stale.steps_saved)} training steps saved` : "";
  const doing = stale.is_asleep ? "asleep, not worth training" : "training goes on";
  if (stale.low === null || stale.high === null) return tile("Since promotion", "–", `${doing}${saved}`);
  const change = stale.low <= 0 && stale.high >= 0 ? "unchanged" : signed(-stale.loss);
  return tile("Since promotion", change, `tau ${stale.tau_then.toFixed(2)}, now ${stale.tau_now.toFixed(2)}, 95% [${signed(-stale.high)}, ${signed(-stale.low)}]; ${doing}${saved}`, {tone: stale.low > 0 ? "warn" : ""});
}

function buildTiles({buffer, gates, training, staleness}) {
  const fill = buffer.at(-1), gate = gates[0], train = training.at(-1);
  return [
    fill ? tile("Buffer", `${number(fill.records)} records`, `${bytes(fill.bytes)}${fill.max_bytes ? ` of ${bytes(fill.max_bytes)}` : ""}, ${number(fill.held_out)} held out`,
      {meter: fill.max_bytes ? fill.bytes / fill.max_bytes : null}) : tile("Buffer", "–", "no records yet"),
    fill ? lagTile(fill) : tile("Behind traffic", "–", "nothing to train on yet"),
    train ? tile("Training", `step ${number(train.step)}`, [train.loss === null ? "loss is not finite" : `loss ${train.loss.toFixed(3)}`, train.tokens_per_s ? `${number(train.tokens_per_s)} tokens/s` : null].filter(Boolean).join(", "),
      {tone: train.loss === null ? "bad" : ""}) : tile("Training", "–", "no step yet"),
    gate ? tile("Last verdict", gate.gain === null ? gate.verdict : signed(gate.gain), `${gate.gain === null ? "" : `${gate.verdict}, `}${version(gate.candidate)} against ${version(gate.incumbent)}`, {tone: TONES[gate.verdict]})
      : tile("Last verdict", "–", "no candidate judged yet"),
    stalenessTile(staleness),
  ];
}

/** The legend shows each curve's current value, so that most readers need no axis. */
function withLegend(place, items, draw) {
  const legend = h("ul", {class: "legend"}, ...items.map(([paint, name, value, note, block]) => {
    const swatch = h("span", {class: `swatch${block ? " block" : ""}`});
    swatch.style.background = paint;
    return h("li", {}, swatch, name, h("b", {}, value), note ? h("span", {class: "on"}, note) : null);
  }));
  let canvas = place.querySelector(".canvas");
  if (!canvas) place.replaceChildren(h("ul", {class: "legend"}), canvas = h("div", {class: "canvas"}));
  place.firstChild.replaceWith(legend);
  draw(canvas);
}

function curves(place, list, view, empty, height) {
  if (!list.length) return place.replaceChildren(none(empty));
  const lines = list.map(({name, tau, points, target_version}, index) => ({name: server(name), target: target_version, tau: tau.toFixed(2), color: color(index), points: points.map(([at, value, , on]) => [at, value, version(on)])}));
  withLegend(place, lines.map(line => [line.color, line.name, line.tau, line.points.at(-1)[2] + (line.target && ` for target ${line.target}`)]), canvas => timeChart(canvas, {
    label: `tokens per drafted step: ${lines.map(line => `${line.name} ${line.tau}`).join(", ")}`,
    lines, height, begin: view.begin_s, end: view.now_s, gap: view.gap_s, format: value => value.toFixed(2), axis: value => value.toFixed(1), least: .4, floor: 1,  // a step emits at least the bonus token
    marks: view.marks.map(mark => ({time_s: mark.time_s, name: mark.is_rollback ? `↩ ${version(mark.version)}` : version(mark.version), back: mark.is_rollback})),
  }));
}

function showPositions(place, positions) {
  if (!positions.length) return place.replaceChildren(none("Appears once a server has answered requests."));
  const series = positions.map(({version: name, shares}, index) => ({name: version(name), shares, color: index ? color(7) : color(0)}));
  withLegend(place, series.map((item, index) => [item.color, item.name, "", index ? "before" : "now", true]), canvas => barChart(canvas, {label: "acceptance by position", series}));
}

function showBuffer(place, view) {
  if (!view.buffer.length) { $("drops").replaceChildren(); return place.replaceChildren(none("No records have arrived. Check that the servers capture traffic and that the learner reads from the same spool or log.")); }
  const line = {name: "records", color: color(0), points: view.buffer.map(entry => [entry.time_s, entry.records, bytes(entry.bytes)])};
  const bars = view.drops.map(([at, counts]) => [at, Object.values(counts).reduce((a, b) => a + b, 0), Object.keys(counts).map(name => name.replaceAll("_", " ")).join(", ")]);
  withLegend(place, [[color(0), "records", number(line.points.at(-1)[1])], [color(1), "dropped", number(bars.reduce((sum, bar) => sum + bar[1], 0)), "in this range", true]],
    canvas => timeChart(canvas, {label: `records in the buffer: ${line.points.at(-1)[1]}`, lines: [line], bars: bars.length ? bars : null, begin: view.begin_s, end: view.now_s, gap: view.gap_s, bucket: view.width_s,
      format: value => number(value), axis: value => value >= 1000 ? `${number(value / 1000, value % 1000 ? 1 : 0)}k` : number(value), from: 0, least: 4, fill: true, height: 250}));
  const counts = Object.entries(view.buffer.at(-1).dropped).filter(([, count]) => count);
  $("drops").replaceChildren(h("div", {class: "chips"}, ...counts.map(([name, count]) => h("span", {}, `${name.replaceAll("_", " ")} ${number(count)}`))));
}

function showTraining(place, view) {
  const names = {alpha: "alpha", alpha_greedy: "alpha greedy"};
  const lines = Object.entries(names).map(([key, name], index) => ({name, color: color(index * 2), points: view.training.filter(entry => entry[key] !== null).map(entry => [entry.time_s, entry[key], `step ${number(entry.step)}`])}))
    .filter(line => line.points.length);
  if (!lines.length) return place.replaceChildren(none("No training step has been made yet."));
  withLegend(place, lines.map(line => [line.color, line.name, line.points.at(-1)[1].toFixed(3)]), canvas => timeChart(canvas, {
    label: "acceptance in training", lines, begin: view.begin_s, end: view.now_s, gap: view.gap_s, format: value => value.toFixed(3), axis: value => value.toFixed(2), least: .1, height: 250,
  }));
}

function table(names, rows) {
  return h("div", {class: "scroll"}, h("table", {}, h("thead", {}, h("tr", {}, ...names.map(name => h("th", {}, name)))), h("tbody", {}, ...rows)));
}

function showGates(place, gates) {
  if (!gates.length) return place.replaceChildren(none("No candidate has been judged yet."));
  const bounds = gates.flatMap(gate => [gate.low ?? 0, gate.high ?? 0]);
  const scale = [Math.min(-.1, ...bounds), Math.max(.1, ...bounds)];
  place.replaceChildren(table(["when", "verdict", "candidate", intervalAxis(scale), "gain", "by domain and context, and reason"], gates.map(gate => {
    const tone = TONES[gate.verdict], known = gate.gain !== null;
    const numbers = known ? `${signed(gate.gain)} [${signed(gate.low)}, ${signed(gate.high)}]` : "–";
    const chips = [...Object.entries(gate.domains), ...Object.entries(gate.contexts)].map(([name, {gain, low, high, requests}]) =>
      h("span", {title: `[${signed(low)}, ${signed(high)}] over ${requests} requests`}, `${name || "no domain"} ${signed(gain)}`));
    return h("tr", {}, when(gate.time_s), h("td", {class: "tight"}, badge(gate.verdict, tone)),
      h("td", {class: "tight"}, version(gate.candidate), h("span", {class: "note"}, ` against ${version(gate.incumbent)}`)),
      h("td", {class: "interval"}, known ? intervalChart({low: gate.low, high: gate.high, value: gate.gain, tone}, scale) : ""),
      h("td", {class: "tight"}, numbers), h("td", {class: "reason"}, h("div", {class: "chips"}, ...chips), gate.reason));
  })));
}

function showSwaps(place, swaps) {
  if (!swaps.length) return place.replaceChildren(none("No server has been asked to change its draft yet."));
  place.replaceChildren(table(["when", "outcome", "draft", "server", "took", "reason"], swaps.map(swap => h("tr", {},
    when(swap.time_s), h("td", {class: "tight"}, badge(swap.outcome, TONES[swap.outcome])),
    h("td", {class: "tight"}, `${swap.from_version ? `${version(swap.from_version)} → ` : ""}${version(swap.version)}`),
    h("td", {class: "tight"}, server(swap.server)), h("td", {class: "tight soft"}, swap.duration_ms === null ? "" : `${number(swap.duration_ms)} ms`),
    h("td", {class: "reason"}, swap.reason)))));
}

function showFaults(faults) {
  $("fault-card").hidden = !faults.length;
  $("faults").replaceChildren(table(["when", "what", "detail"], faults.map(fault => h("tr", {},
    when(fault.time_s), h("td", {class: "tight"}, badge(fault.what.replaceAll("_", " "), "warn")), h("td", {class: "reason"}, fault.reason || (fault.detail ?? ""))))));
}

function show(view) {
  latest = view;
  showAnswer(view);
  const width = innerWidth, frame = [view.begin_s, view.now_s, view.marks, width];
  changed("tiles", [view.buffer.at(-1), view.gates[0], view.training.at(-1), view.staleness], () => $("tiles").replaceChildren(...buildTiles(view)));
  changed("servers", [view.servers, frame], () => curves($("servers"), view.servers, view, "No server has answered requests with a draft in this time range.", 290));
  changed("paces", view.paces, () => $("paces").replaceChildren(...Object.entries(view.paces).map(([name, pace]) => h("p", {class: "soft"}, `${server(name)}: ${pace}`))));
  changed("domains", [view.domains, frame], () => curves($("domains"), view.domains, view, "No captured requests in this time range."));
  changed("positions", [view.positions, width], () => showPositions($("positions"), view.positions));
  changed("buffer", [view.buffer, view.drops, frame], () => showBuffer($("buffer"), view));
  changed("training", [view.training, frame], () => showTraining($("training"), view));
  changed("gates", view.gates, () => showGates($("gates"), view.gates));
  changed("swaps", view.swaps, () => showSwaps($("swaps"), view.swaps));
  changed("faults", view.faults, () => showFaults(view.faults));
  document.body.dataset.ready = "yes";
}

function showLive() {
  const silent_s = (performance.now() - heard_ms) / 1000, on = heard_ms && silent_s < 3 * POLL_MS / 1000;
  const text = on ? "live" : heard_ms ? `no answer from the learner for ${duration(Math.round(silent_s))}: the page may be out of date` : "connecting";
  const live = $("live");
  if (live.textContent !== text) live.textContent = text;
  live.className = `live ${on ? "on" : heard_ms ? "off" : ""}`;
}

/** The overview; null while the learner restarts. The page then keeps its content and says how old it is. */
async function fetchOverview() {
  try {
    const answer = await fetch(`overview.json?range_s=${RANGES[range]}`, {signal: AbortSignal.timeout(10000)});
    return answer.ok ? await answer.json() : null;
  } catch { return null; }
}

/** Fetch now, and again after a while. A later call replaces one still waiting for its answer. */
async function poll() {
  clearTimeout(waiting);
  const mine = ++turn, view = await fetchOverview();
  if (mine !== turn) return;
  if (view) { show(view); heard_ms = performance.now(); }
  showLive();
  waiting = setTimeout(poll, document.hidden ? 10 * POLL_MS : POLL_MS);
}

function showRanges() {
  $("ranges").replaceChildren(...Object.keys(RANGES).map(name => {
    const button = h("button", {type: "button", "aria-pressed": String(name === range)}, name);
    button.onclick = () => { range = name; history.replaceState(null, "", `#${encodeURIComponent(name)}`); showRanges(); poll(); };
    return button;
  }));
}

addEventListener("resize", () => latest && show(latest));
document.addEventListener("visibilitychange", () => document.hidden || poll());
setInterval(showLive, 1000);
showRanges();
poll();
