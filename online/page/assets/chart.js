// Charts over time as SVG: lines, bars below them, marks, and a cross-hair with every value. Colours come from the page.

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = {left: 46, right: 14, top: 22, bottom: 26};
const TICK_STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

/** An element with attributes and children; text is always text, never markup. */
export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}

export function s(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes))
    key === "style" ? element.style.cssText = value : element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export const color = index => `var(--s${index})`;

export function clock(time_s, long) {
  const format = {hour: "2-digit", minute: "2-digit", hourCycle: "h23", ...(long ? {second: "2-digit"} : {})};
  return new Date(time_s * 1000).toLocaleTimeString([], format);
}

function timeTicks(begin, end, count) {
  const step = TICK_STEPS_S.find(step => (end - begin) / step <= count) ?? TICK_STEPS_S.at(-1);
  const zone = new Date(end * 1000).getTimezoneOffset() * 60;
  const ticks = [];
  for (let at = Math.ceil((begin - zone) / step) * step + zone; at <= end; at += step) ticks.push(at);
  const name = at => step >= 86400 ? new Date(at * 1000).toLocaleDateString([], {day: "numeric", month: "short"}) : clock(at, step < 60);
  return ticks.map(at => [at, name(at)]);
}

function niceStep(span, count) {
  const raw = span / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 2.5, 5, 10].map(factor => factor * power).find(step => step >= raw * 0.999);
}

function valueTicks(low, high, count) {
  const step = niceStep(high - low, count), ticks = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) ticks.push(at + 0);  // not -0
  return ticks;
}

function computeRange(values, {from = null, least = 0, floor = -Infinity}) {
  let low = from ?? Math.min(...values), high = Math.max(...values);
  if (high - low < least) { const middle = (high + low) / 2; high = middle + least / 2; low = from ?? middle - least / 2; }
  const step = niceStep(high - low, 4);
  return [from ?? Math.max(floor, Math.floor(low / step + 1e-9) * step), Math.ceil(high / step - 1e-9) * step || 1];
}

/** "M x y L x y ...", with a break between two points more than `gap` apart. */
function path(points, x, y, gap) {
  let before = -Infinity;
  return points.map(([at, value]) => {
    const command = at - before > gap ? "M" : "L";
    before = at;
    return `${command}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
  }).join("");
}

const nearest = (points, at) => points.reduce((best, point) => Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best, points[0]);

/**
 * Draw into `place`. `lines`: [{name, color, points: [[time_s, value, note]]}]; `marks`: [{time_s, name, back}];
 * `bars`: [[time_s, count, note]], in a separate strip below; `format`: turns a value into text.
 */
export function timeChart(place, {label, lines, marks = [], bars = null, begin, end, gap, bucket = 1, height = 230, format, axis = format, from = null, least = 0, floor = -Infinity, fill = false}) {
  const width = Math.max(place.clientWidth, 200), strip = bars ? 52 : 0;
  const right = width - MARGIN.right, bottom = height - MARGIN.bottom - strip;
  const values = lines.flatMap(line => line.points.map(point => point[1]));
  const [low, high] = computeRange(values, {from, least, floor});
  const span = Math.max(end - begin, 1);
  const x = at => MARGIN.left + (at - begin) / span * (right - MARGIN.left);
  const y = value => bottom - (value - low) / (high - low || 1) * (bottom - MARGIN.top);
  const svg = s("svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label});

  for (const tick of valueTicks(low, high, height > 250 ? 5 : 4)) {
    svg.append(s("line", {class: "grid", x1: MARGIN.left, x2: right, y1: y(tick), y2: y(tick)}));
    svg.append(s("text", {x: MARGIN.left - 8, y: y(tick) + 4, "text-anchor": "end"}, axis(tick)));
  }
  for (const [at, name] of timeTicks(begin, end, Math.max(2, width / 100)))
    if (x(at) < right - 12) svg.append(s("text", {x: x(at), y: height - 6, "text-anchor": "middle"}, name));
  drawMarks(svg, marks, x, bottom);
  for (const line of lines) {
    if (fill) svg.append(s("path", {class: "area", style: `fill:${line.color};opacity:.13`, d: area(line.points, x, y, bottom)}));
    svg.append(s("path", {class: "line", style: `stroke:${line.color}`, d: path(line.points, x, y, gap)}));
    const last = line.points.at(-1);
    svg.append(s("circle", {cx: x(last[0]), cy: y(last[1]), r: 3.5, style: `fill:${line.color}`}));
  }
  if (bars) drawBars(svg, bars, x, bottom + 12, height - MARGIN.bottom, right, Math.max(1, Math.min(6, .75 * (x(begin + bucket) - x(begin)))));
  place.replaceChildren(svg);
  hover(place, svg, {lines, bars, x, y, begin, span, right, bottom, gap, format});
}

const area = (points, x, y, bottom) =>
  `M${x(points[0][0])} ${bottom}${points.map(([at, value]) => `L${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("")}L${x(points.at(-1)[0])} ${bottom}Z`;

function drawMarks(svg, marks, x, bottom) {
  let taken = -Infinity;
  for (const {time_s, name, back} of marks) {
    const at = x(time_s), kind = back ? " back" : "", long = 8 * name.length;
    svg.append(s("line", {class: "mark" + kind, x1: at, x2: at, y1: MARGIN.top - 4, y2: bottom}, s("title", {}, `${name} ${clock(time_s, true)}`)));
    const text = at - long / 2 < taken && back ? "↩" : name;
    if (at - 4 * text.length < taken) continue;
    svg.append(s("text", {class: "mark-name" + kind, x: at, y: MARGIN.top - 9, "text-anchor": "middle"}, text));
    taken = at + 4 * text.length + 4;
  }
}

function drawBars(svg, bars, x, top, bottom, right, wide) {
  const most = Math.max(1, ...bars.map(bar => bar[1]));
  svg.append(s("line", {class: "axis", x1: MARGIN.left, x2: right, y1: bottom, y2: bottom}));
  svg.append(s("text", {x: MARGIN.left - 8, y: top + 10, "text-anchor": "end"}, String(most)));
  for (const [at, count] of bars) {
    const tall = Math.max(2, (bottom - top) * count / most);
    svg.append(s("rect", {class: "bar", x: x(at) - wide / 2, width: wide, y: bottom - tall, height: tall, rx: wide / 4, style: "fill:var(--s1)"}));
  }
}

/** The place keeps one pointer position, so that the cross-hair stays while the chart below it is redrawn. */
function hover(place, svg, view) {
  const show = () => {
    svg.querySelectorAll(".cross, .dot").forEach(element => element.remove());
    if (!place.pointer) return;
    const box = svg.getBoundingClientRect();
    const at = view.begin + (place.pointer.x - box.left - MARGIN.left) / (view.right - MARGIN.left) * view.span;
    const found = view.lines.map(line => [line, nearest(line.points, at)]).filter(([, point]) => Math.abs(point[0] - at) <= Math.max(view.gap, view.span / 40));
    const bar = view.bars?.length ? nearest(view.bars, at) : null;
    const dropped = bar && Math.abs(bar[0] - at) <= view.span / 60 ? bar : null;
    if (!found.length && !dropped) return tooltip(null);
    const when = found.length ? found.reduce((a, b) => Math.abs(a[1][0] - at) < Math.abs(b[1][0] - at) ? a : b)[1][0] : dropped[0];
    svg.append(s("line", {class: "cross", x1: view.x(when), x2: view.x(when), y1: MARGIN.top, y2: view.bottom}));
    for (const [line, point] of found)
      svg.append(s("circle", {class: "dot", cx: view.x(point[0]), cy: view.y(point[1]), r: 4.5, style: `fill:${line.color};stroke:var(--card);stroke-width:2`}));
    tooltip(place.pointer, clock(when, true), [
      ...found.map(([line, point]) => [line.color, line.name + (point[2] ? ` · ${point[2]}` : ""), view.format(point[1])]),
      ...(dropped ? [[color(1), `dropped: ${dropped[2]}`, String(dropped[1])]] : []),
    ]);
  };
  place.onpointermove = event => { place.pointer = {x: event.clientX, y: event.clientY}; show(); };
  place.onpointerleave = () => { place.pointer = null; tooltip(null); show(); };
  if (place.pointer) show();
}

function tooltip(pointer, when, items) {
  const element = document.getElementById("tooltip");
  element.hidden = !pointer;
  if (!pointer) return;
  element.replaceChildren(h("div", {class: "when"}, when), ...items.map(([paint, name, value]) => {
    const swatch = h("span", {class: "swatch"});
    swatch.style.background = paint;
    return h("div", {class: "item"}, swatch, name, h("b", {}, value));
  }));
  const {width, height} = element.getBoundingClientRect();
  element.style.left = `${Math.max(6, pointer.x + 16 + width > innerWidth ? pointer.x - width - 16 : pointer.x + 16)}px`;
  element.style.top = `${Math.max(6, Math.min(pointer.y + 14, innerHeight - height - 6))}px`;
}

/** Groups of bars, one bar per series in each group: `series` [{name, color, shares}], shares between 0 and 1. */
export function barChart(place, {label, series, height = 230}) {
  const width = Math.max(place.clientWidth, 200), bottom = height - MARGIN.bottom, right = width - MARGIN.right;
  const count = Math.max(...series.map(({shares}) => shares.length)), group = (right - MARGIN.left) / count;
  const bar = Math.min(46, group * .74 / series.length);
  const y = share => bottom - share * (bottom - MARGIN.top);
  const svg = s("svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label});
  for (const tick of [0, .25, .5, .75, 1]) {
    svg.append(s("line", {class: "grid", x1: MARGIN.left, x2: right, y1: y(tick), y2: y(tick)}));
    svg.append(s("text", {x: MARGIN.left - 8, y: y(tick) + 4, "text-anchor": "end"}, `${100 * tick}%`));
  }
  for (let position = 0; position < count; position++) {
    const middle = MARGIN.left + group * (position + .5);
    svg.append(s("text", {x: middle, y: height - 6, "text-anchor": "middle"}, count < 9 ? `token ${position + 1}` : String(position + 1)));
    series.forEach(({name, color, shares}, index) => {
      const share = shares[position] ?? 0, left = middle + bar * (index - series.length / 2);
      svg.append(s("rect", {class: "bar", x: left + 1, width: bar - 2, y: y(share), height: bottom - y(share), rx: 3, style: `fill:${color}`},
        s("title", {}, `${name}, token ${position + 1}: ${(100 * share).toFixed(1)}%`)));
      if (bar > 30) svg.append(s("text", {class: index ? "" : "value", x: left + bar / 2, y: y(share) - 5, "text-anchor": "middle"}, `${(100 * share).toFixed(0)}%`));
    });
  }
  place.replaceChildren(svg);
}

const INTERVAL_WIDTH = 220;

/** Labels of the axis shared by the intervals below. */
export function intervalAxis([from, to]) {
  const x = at => (at - from) / (to - from) * INTERVAL_WIDTH, signed = at => (at > 0 ? "+" : "−") + Math.abs(at).toFixed(2);
  const text = (at, anchor, name) => s("text", {x: x(at), y: 13, "text-anchor": anchor}, name);
  return s("svg", {class: "interval-axis", viewBox: `0 0 ${INTERVAL_WIDTH} 16`, width: INTERVAL_WIDTH, height: 16},
    ...(x(0) > 55 ? [text(from, "start", signed(from))] : []), text(0, "middle", "0"), text(to, "end", signed(to)));
}

/** One interval on the shared axis: a bar from low to high, a dot at the value, a line at zero. */
export function intervalChart({low, high, value, tone}, [from, to]) {
  const width = INTERVAL_WIDTH, x = at => (at - from) / (to - from) * width;
  return s("svg", {viewBox: `0 0 ${width} 16`, width, height: 16, role: "img", "aria-label": `${value} between ${low} and ${high}`},
    s("line", {x1: 0, x2: width, y1: 8, y2: 8, style: "stroke:var(--line)"}),
    s("line", {x1: x(0), x2: x(0), y1: -3, y2: 19, style: "stroke:var(--faint)"}),
    s("line", {x1: x(low), x2: x(high), y1: 8, y2: 8, style: `stroke:var(--${tone});stroke-width:5;stroke-linecap:round;opacity:.38`}),
    s("circle", {cx: x(value), cy: 8, r: 5, style: `fill:var(--${tone})`}));
}
