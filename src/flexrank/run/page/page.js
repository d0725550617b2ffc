"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (name) => document.getElementById(name);
const COLOURS = ["var(--after)", "#009e73", "#cc79a7", "#d55e00", "#8c6bb1", "#808080", "#9a8500", "#a0662c", "#0090a0", "#c0504d"];
const AXES = { params_model: "parameters of the model", bytes: "bytes on disk", latency_ratio: "time over the base model's" };
const chosen = { run: 0, row: 0, measure: null, axis: "params_model" };

const unitOf = (number) => [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]].find(([scale]) => Math.abs(number) >= scale) ?? [1, ""];

function count(number) {
  const [scale, unit] = unitOf(number);
  return unit ? (number / scale).toFixed(number < 100 * scale ? 2 : 0) + unit : String(Number(number.toFixed(2)));
}

// A tick's number, with as many decimals as the step between ticks has.
function tick(number, step) {
  const [scale, unit] = unitOf(number), decimals = Math.max(0, -Math.floor(Math.log10(step / scale)));
  const digits = () => Math.ceil(Math.log10(Math.abs(number) / step));
  return decimals > 6 ? number.toExponential(Math.min(20, Math.max(0, digits()))) : (number / scale).toFixed(decimals) + unit;
}

function element(name, attributes = {}, ...children) {
  const space = SVG.has(name) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const made = document.createElementNS(space, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
const SVG = new Set(["svg", "g", "line", "path", "circle", "text", "title"]);

// A chart of lines {points: [[x, y]], label, style, kind}, with a dot {x, y, style, r, label} for each of `dots`.
function chart(place, lines, dots, labels, isLogarithmic = false) {
  const width = Math.min(920, Math.max(320, place.clientWidth)), height = Math.min(380, Math.max(260, width * 0.5));
  const [left, bottom, top, right] = [58, 44, 10, 18];
  const shown = (y) => (isLogarithmic ? Math.log10(y) : y);
  const points = [...lines.flatMap((line) => line.points), ...dots.map(({ x, y }) => [x, y])];
  const [x0, x1] = reach(points.map((point) => point[0])), [y0, y1] = reach(points.map((point) => shown(point[1])));
  const atX = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - right);
  const atY = (y) => height - bottom - ((shown(y) - y0) / (y1 - y0)) * (height - bottom - top);
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": labels.name });
  const text = (x, y, anchor, content) => svg.append(element("text", { x, y, "text-anchor": anchor }, content));
  const across = ticks(x0, x1, width / 90), up = isLogarithmic ? powers(y0, y1) : ticks(y0, y1, 5);
  for (const y of up.values) {
    svg.append(element("line", { class: "grid", x1: left, x2: width - right, y1: atY(y), y2: atY(y) }));
    const round = Number(y.toPrecision(1));
    text(left - 6, atY(y) + 4, "end", !isLogarithmic ? tick(y, up.step) : y < 1e-3 ? round.toExponential() : String(round));
  }
  for (const x of across.values) text(atX(x), height - bottom + 18, "middle", tick(x, across.step));
  text((left + width) / 2, height - 6, "middle", labels.below);
  for (const { points: own, kind, style, label } of lines) {
    const path = "M" + own.map(([x, y]) => `${atX(x).toFixed(1)} ${atY(y).toFixed(1)}`).join("L");
    svg.append(element("path", { class: kind, d: path, style: `stroke:${style}` }, element("title", {}, label)));
  }
  for (const { x, y, style, r, label } of dots)
    svg.append(element("circle", { cx: atX(x), cy: atY(y), r, style: `fill:${style}` }, element("title", {}, label)));
  place.replaceChildren(svg);
}

function reach(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const room = (high - low || Math.abs(high)) * 0.04 || 1;
  return [low - room, high + room];
}

// Round numbers between two, about so many, and the step between them.
function ticks(low, high, number) {
  const rough = (high - low) / number, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((times) => times * power >= rough);
  const first = Math.ceil(low / step), last = Math.floor(high / step);
  return { step, values: Array.from({ length: Math.max(0, last - first + 1) }, (_, at) => (first + at) * step) };
}

// Powers of ten between two logarithms, about five; where these are few, also 2 and 5 times these.
function powers(low, high) {
  const step = Math.max(1, Math.round((high - low) / 5)), first = Math.floor(low / step);
  const whole = Array.from({ length: Math.ceil(high / step) - first + 1 }, (_, at) => (first + at) * step);
  const all = whole.flatMap((power) => (high - low < 2 ? [1, 2, 5] : [1]).map((times) => times * 10 ** power));
  return { values: all.filter((one) => Math.log10(one) >= low && Math.log10(one) <= high) };
}

const run = () => data.runs[chosen.run];
const row = () => run().rows[chosen.row];

function showFacts() {
  const base = run().base, facts = byId("facts");
  const share = (value, whole) => `${Math.round((100 * value) / whole)} %`;
  const entries = [
    ["parameters", count(row().params_model), share(row().params_model, base.params_model)],
    ["in factorised layers", count(row().params_layers), share(row().params_layers, base.params_layers)],
    ["on disk", count(row().bytes) + "B", share(row().bytes, base.bytes)],
    ["mean rank", row().mean_rank.toFixed(0), share(row().mean_rank_fraction, 1)],
  ];
  if (row().latency_ratio !== null) entries.push(["time", row().latency_ratio.toFixed(2) + "×", "of the base model's"]);
  for (const [name, value] of Object.entries(row().quality)) {
    const before = row().quality_before?.[name];
    const more = `${before === undefined ? "" : before.toFixed(4) + " before, "}base ${base.quality[name].toFixed(4)}`;
    entries.push([data.labels[name] ?? name, value.toFixed(4), more]);
  }
  facts.replaceChildren(...entries.map(([name, value, more]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value, " ", element("small", {}, more)))));
  byId("budget").value = row().budget;
  byId("command").textContent = `flexrank deploy ${run().directory} --budget ${row().budget} --output small/`;
}

function showFront() {
  const { measure, axis } = chosen, lines = [], dots = [];
  data.runs.forEach((one, number) => {
    const rows = one.rows.filter((each) => each[axis] !== null && measure in each.quality);
    if (!rows.length) return;
    const style = COLOURS[number % COLOURS.length];
    lines.push({ kind: "after", style, label: one.name, points: rows.map((each) => [each[axis], each.quality[measure]]) });
    if (rows.every((each) => each.quality_before))
      lines.push({ kind: "before", style: data.runs.length === 1 ? "var(--before)" : style,
        label: `${one.name} before consolidation`, points: rows.map((each) => [each[axis], each.quality_before[measure]]) });
    for (const each of rows)
      dots.push({ x: each[axis], y: each.quality[measure], style, r: one === run() && each === row() ? 8 : 3.5,
        label: `${one.name} at ${each.budget}: ${each.quality[measure].toFixed(4)}` });
  });
  const whole = run().base, at = axis === "latency_ratio" ? 1 : whole[axis];
  if (measure in whole.quality) {
    const level = whole.quality[measure], from = Math.min(...lines.flatMap((line) => line.points.map((point) => point[0])));
    lines.push({ kind: "base", style: "var(--soft)", label: "base model", points: [[from, level], [at, level]] });
  }
  const name = data.labels[measure] ?? measure;
  chart(byId("front"), lines, dots, { name: `${name} over ${AXES[axis]}`, below: AXES[axis] });
  const has = (kind) => lines.some((line) => line.kind === kind);
  const kinds = [["before", "solid: after consolidation; dashed: before it"], ["base", "dotted: the base model"]];
  const text = kinds.filter(([kind]) => has(kind)).map(([, words]) => words).join("; ");
  const names = data.runs.length === 1 ? "" : lines.filter((line) => line.kind === "after").map((line) => line.label).join(", ") + ". ";
  const better = `${data.lower.includes(measure) ? "Lower" : "Higher"} is better.`;
  byId("front-caption").textContent = `${names}${text && text[0].toUpperCase() + text.slice(1) + ". "}${better}`;
}

function showRanks() {
  const head = element("tr", {}, element("th", {}, "block"), ...run().modules.map((name) =>
    element("th", { scope: "col" }, name.replaceAll(".", ".\u200b"))));  // which may end a line there
  const body = run().blocks.map((block) => {
    const cells = run().modules.map((module) => {
      const name = block && module ? `${block}.${module}` : block || module, layer = run().layers[name];
      if (!layer) return element("td", {}, "");
      const rank = row().ranks[name], full = Math.min(...layer.shape), share = (rank / full).toFixed(3);
      return element("td", { "data-share": share, style: `--share:${share}`, title: `${name}: rank ${rank} of ${full}` }, String(rank));
    });
    return element("tr", {}, element("th", { scope: "row" }, block || "—"), ...cells);
  });
  byId("ranks").replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
}

function showSensitivity() {
  const table = run().sensitivity;
  byId("sensitivity-part").hidden = !table;
  if (!table) return;
  const lines = [], dots = [];
  for (const [name, ranks] of Object.entries(table.ranks)) {
    const [m, n] = run().layers[name].shape, module = run().modules.findIndex((one) => name === one || name.endsWith(`.${one}`));
    const style = COLOURS[module % COLOURS.length];
    const kept = (rank) => Math.min(1, (rank * (m + n - rank)) / (m * n));
    const points = ranks.map((rank, at) => [kept(rank), table.errors[name][at]]).filter((point) => point[1] > 0);
    if (points.length > 1) lines.push({ kind: "layer", style, label: name, points });
    const own = row().ranks[name], above = ranks.findIndex((rank) => rank >= own), below = Math.max(0, above - 1);
    const part = ranks[above] === ranks[below] ? 0 : (own - ranks[below]) / (ranks[above] - ranks[below]);
    const error = table.errors[name][below] + part * (table.errors[name][above] - table.errors[name][below]);
    if (error > 0) dots.push({ x: kept(own), y: error, style, r: 2.5, label: `${name}: rank ${own}` });
  }
  const labels = { name: "error of each layer over its parameters", below: "share of the layer's parameters" };
  byId("sensitivity-part").hidden = !dots.length;  // no layer has a positive error
  if (!dots.length) return;
  chart(byId("sensitivity"), lines, dots, labels, true);
  byId("modules").replaceChildren(...run().modules.map((module, at) =>
    element("li", { style: `--colour:${COLOURS[at % COLOURS.length]}` }, module)));
}

function show() {
  showFacts(); showFront(); showRanks(); showSensitivity();
  document.querySelectorAll("tr[data-run]").forEach((line) =>
    line.classList.toggle("chosen", Number(line.dataset.run) === chosen.run && Number(line.dataset.budget) === row().budget));
}

function chooseRun(number) {
  const budget = data.runs[chosen.run].rows[chosen.row]?.budget;
  chosen.run = number;
  const same = run().rows.findIndex((each) => each.budget === budget);
  chosen.row = same >= 0 ? same : Math.floor(run().rows.length / 2);
  Object.assign(byId("slider"), { max: run().rows.length - 1, value: chosen.row });
  byId("slider").setAttribute("aria-valuetext", `budget ${row().budget}`);
}

// Says so for a second; where the browser refuses, the command is selected, for the keyboard to copy.
async function copyCommand() {
  const command = byId("command");
  const isCopied = await navigator.clipboard?.writeText(command.textContent).then(() => true, () => false);
  if (!isCopied) getSelection().selectAllChildren(command);
  byId("copied").value = isCopied ? "Copied" : "Selected: copy it by the keyboard";
  setTimeout(() => { byId("copied").value = ""; }, isCopied ? 1000 : 5000);
}

function options(select, entries, change) {
  select.replaceChildren(...entries.map(([value, label]) => element("option", { value }, label)));
  select.addEventListener("change", () => { change(select.value); show(); });
}

function start() {
  const measures = [...new Set(data.runs.flatMap((one) => Object.keys(one.base.quality)))];
  const axes = Object.entries(AXES).filter(([key]) => data.runs.every((one) => one.rows.every((each) => each[key] !== null)));
  chosen.measure = measures[0];
  options(byId("measure"), measures.map((name) => [name, data.labels[name] ?? name]), (value) => { chosen.measure = value; });
  options(byId("axis"), axes, (value) => { chosen.axis = value; });
  if (data.runs.length > 1)
    byId("runs").replaceChildren(...data.runs.map((one, number) => {
      const input = element("input", { type: "radio", name: "run", value: number, ...(number ? {} : { checked: "" }) });
      input.addEventListener("change", () => { chooseRun(number); show(); });
      return element("label", { style: `--colour:${COLOURS[number % COLOURS.length]}` }, input, ` ${one.name}`);
    }));
  byId("slider").addEventListener("input", () => {
    chosen.row = Number(byId("slider").value);
    byId("slider").setAttribute("aria-valuetext", `budget ${row().budget}`);
    show();
  });
  byId("copy").addEventListener("click", copyCommand);
  chosen.row = Math.floor(run().rows.length / 2);
  chooseRun(0);
  byId("choose").hidden = false;
  show();
}

start();
window.addEventListener("resize", show);
