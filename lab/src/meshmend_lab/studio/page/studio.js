// The studio: holds the state, asks about it, and shows the answers. Every change asks anew and ends what was asked.

import {ask, askOnce, download, get} from "./client.js";
import {MeshView} from "./mesh.js";
import {Alternatives, notice, offer, showAnswer, showLegend, showNoPlan} from "./panels.js";
import {Film} from "./film.js";
import * as states from "./state.js";

const $ = id => document.getElementById(id);
const EXAMPLES = {
  "8×8 minus a board": "shape=8x8&fail=2x2@2,2&hardware=tpu-v6e",
  "16×32 minus a host, as in the paper": "shape=16x32&fail=4x2@6,8&hardware=tpu-v6e&payload=1GB",
  "16×16 torus, v5e": "shape=16x16&wrap=all&hardware=tpu-v5e&payload=1GB",
  "4×4×8 torus, v5p": "shape=4x4x8&wrap=all&hardware=tpu-v5p&payload=1GB",
  "4×8 with a slow column": "shape=4x8&cable-rate=0,3-0,4=1/2&cable-rate=1,3-1,4=1/2&cable-rate=2,3-2,4=1/2&cable-rate=3,3-3,4=1/2&hardware=tpu-v6e",
  "12×12, badly hurt": "shape=12x12&fail=2x2@2,2&fail=4x2@6,8&fail=0,7&fail-cable=9,3-9,4&cable-rate=5,5-5,6=1/2&hardware=tpu-v6e",
};
const CYCLE = {undefined: "1/2", "1/2": "0"};
const WAIT_MS = 60;

const about = await get("about");
const defaults = about.defaults;
let state = states.read(location.hash, defaults);
let last = null, drawn = "", current = null, tool = "1", view = "load", film = null;
const past = [];

const mesh = new MeshView($("view-mesh"), {
  onChip: name => change(next => toggle(next, chipsOfTool(name))),
  onCable: name => change(next => cycle(next, name)),
  onBox: names => change(next => toggle(next, names)),
  onPoint: text => point(text),
});
const hint = $("pointed").innerHTML;
const player = new Film({canvas: $("film"), svg: $("view-mesh"), view: mesh, play: $("film-play"), back: $("film-back"), forward: $("film-forward"), slider: $("film-at"), now: $("film-now")});
mesh.onResize = () => player.resize();
mesh.describe = {
  chip: name => `Chip ${name}: ${state.failed.has(name) ? "failed; a click repairs it." : "live; a click fails it."}`,
  cable: name => {
    const rate = state.cables.get(name), busy = mesh.links?.[name];
    const is = rate === "0" ? "dead" : rate === undefined ? "whole" : `at ${rate} of its rate`;
    return `Cable ${name.replace("-", " – ")}: ${is}${busy && rate !== "0" ? `, busy for ${busy[0].toFixed(3)} and ${busy[1].toFixed(3)} M/b` : ""}.`;
  },
};

// Changes of the state

function toggle(next, names) {
  const inside = names.filter(name => mesh.places.has(name));
  const repairs = inside.every(name => next.failed.has(name));
  for (const name of inside) next.failed[repairs ? "delete" : "add"](name);
}

function cycle(next, name) {
  const rate = next.cables.get(name), to = CYCLE[rate] ?? (rate === "0" ? undefined : "0");
  if (to === undefined) next.cables.delete(name);
  else next.cables.set(name, to);
}

// The board or host that a chip belongs to, in the last two axes; parts of a machine lie side by side from its corner.
function chipsOfTool(name) {
  if (tool === "1") return [name];
  const sides = tool.split("x").map(Number), at = name.split(",").map(Number), n = at.length;
  if (n < 2) return [name];
  const corner = at.map((x, axis) => axis < n - 2 ? x : x - x % sides[axis - n + 2]);
  return states.chipsOf([...Array(n - 2).fill(1), ...sides].join("x") + "@" + corner.join(","));
}

function change(how) {
  const before = states.write(state, defaults);
  const next = {...state, failed: new Set(state.failed), cables: new Map(state.cables)};
  how(next);
  if (next.shape !== state.shape || next.wrap !== state.wrap) { next.failed.clear(); next.cables.clear(); }
  if (states.write(next, defaults) === before) return;
  past.push(before);
  become(next);
}

function become(next) {
  state = next;
  history.replaceState(null, "", "#" + states.write(state, defaults));
  fillControls();
  showState();
  askSoon();
}

const fromFragment = fragment => states.read(fragment, defaults);

function undo() {
  if (past.length) become(fromFragment(past.pop()));
}

// What is shown of the state itself, without an answer

function fillControls() {
  const axes = state.shape.split("x").length;
  const wraps = {none: "none", all: "all axes", ...(axes > 1 ? Object.fromEntries(Array.from({length: axes}, (_, i) => [i, `axis ${i}`])) : {})};
  if (!(state.wrap in wraps)) wraps[state.wrap] = `axes ${state.wrap}`;
  choose($("wrap"), wraps, state.wrap);
  choose($("hardware"), Object.fromEntries(Object.keys(about.hardware).map(name => [name, name])), state.hardware);
  $("hardware").title = about.hardware[state.hardware] ?? "";
  choose($("planner"), Object.fromEntries([...about.planners].map(name => [name, name === "auto" ? "auto (the fastest)" : name])), state.planner);
  for (const name of ["shape", "payload"]) if (document.activeElement !== $(name)) $(name).value = state[name];
  const budget = String(state.budget);
  if (![...$("budget").options].some(option => option.value === budget)) $("budget").add(new Option(`${budget} s`, budget));
  $("budget").value = budget;
  $("undo").disabled = !past.length;
  $("reset").disabled = states.isWhole(state);
}

function choose(select, options, value) {
  const wanted = JSON.stringify(options);
  if (select.dataset.options !== wanted) {
    select.replaceChildren(...Object.entries(options).map(([key, name]) => new Option(name, key)));
    select.dataset.options = wanted;
  }
  if (!(value in options)) select.add(new Option(value, value));
  select.value = value;
}

function showState() {
  if (drawn !== `${state.shape} ${state.wrap}`) return;
  mesh.failures(state.failed, state.cables);
  mesh.svg.setAttribute("aria-label", `Mesh ${state.shape}, ${state.failed.size} failed chips`);
  mesh.stale();
}

function point(text) {
  if ($("pointed").dataset.text === text) return;
  $("pointed").dataset.text = text;
  if (text) $("pointed").textContent = text;
  else $("pointed").innerHTML = hint;
}

// Asking

let soon = null;
function askSoon() {
  current?.abort();
  document.body.classList.add("busy");
  clearTimeout(soon);
  soon = setTimeout(askNow, WAIT_MS);
}

async function askNow() {
  current?.abort();
  const controller = current = new AbortController(), {signal} = controller;
  const question = states.question(state);
  try {
    if (drawn !== `${state.shape} ${state.wrap}`) {
      const facts = await get("layout?" + new URLSearchParams({shape: state.shape, wrap: state.wrap}));
      if (signal.aborted) return;
      mesh.layout(facts);
      mesh.loads(null, 0);
      drawn = `${state.shape} ${state.wrap}`;
      last = null;
      showState();
    }
    $("shape").setAttribute("aria-invalid", "false");
    player.clear();
    film = null;
    const answer = await askOnce("answer", question, signal);
    if (signal.aborted) return;
    showAnswer(answer, last);
    mesh.loads(answer.links, answer.bound_units);
    last = answer;
    document.body.classList.remove("busy");
    document.body.dataset.answered = states.write(state, defaults);
    if (view === "steps") showSteps(signal);
    const table = new Alternatives(answer);
    for await (const row of ask("alternatives", question, signal)) table.add(row);
    document.body.dataset.compared = states.write(state, defaults);
  } catch (error) {
    if (error.name === "AbortError" || signal.aborted) return;
    document.body.classList.remove("busy");
    if (drawn !== `${state.shape} ${state.wrap}`) $("shape").setAttribute("aria-invalid", "true");
    mesh.loads(null, 0);
    $("alternatives").tBodies[0].replaceChildren();
    showNoPlan(error.kind ? error.message : "The studio does not answer. Is `meshmend lab studio` still running?");
    document.body.dataset.answered = states.write(state, defaults);
    if (error.kind === "PlanError") offerPlanners(question, signal);
  }
}

// Another planner may serve what the chosen one cannot.
async function offerPlanners(question, signal) {
  const use = name => change(next => { next.planner = name; });
  const table = new Alternatives({});
  try {
    for await (const row of ask("alternatives", question, signal)) {
      table.add(row);
      if (!row.unsupported_reason && about.planners.includes(row.name)) offer(`Use ${row.name}: ${row.time}`, () => use(row.name));
    }
    document.body.dataset.compared = states.write(state, defaults);
  } catch (error) { if (!signal.aborted) notice(error.message); }
}

async function showSteps(signal = current?.signal) {
  if (film || !last) return;
  try {
    film = await askOnce("steps", states.question(state), signal);
    $("film").hidden = false;
    player.load(film);
    showLegend("steps", film.order.map(number => film.phases[number]));
  } catch (error) {
    if (error.name !== "AbortError") notice(error.message);
  }
}

// Controls

for (const name of ["wrap", "hardware", "planner"]) $(name).addEventListener("change", () => change(next => { next[name] = $(name).value; }));
$("budget").addEventListener("change", () => change(next => { next.budget = Number($("budget").value); }));
$("shape").addEventListener("change", () => change(next => { next.shape = $("shape").value.trim().toLowerCase().replaceAll("×", "x"); if (next.shape.split("x").length !== state.shape.split("x").length) next.wrap = "none"; }));
$("payload").addEventListener("change", () => change(next => { next.payload = $("payload").value.trim(); }));
$("controls").addEventListener("submit", event => event.preventDefault());
for (const name of Object.keys(EXAMPLES)) $("example").add(new Option(name, name));
$("example").addEventListener("change", () => {
  if ($("example").value) { past.push(states.write(state, defaults)); become(fromFragment(EXAMPLES[$("example").value])); }
  $("example").value = "";
});
$("undo").addEventListener("click", undo);
$("reset").addEventListener("click", () => change(next => { next.failed.clear(); next.cables.clear(); }));
document.addEventListener("keydown", event => {
  const typing = event.target.closest("input, select, textarea");
  if (!typing && event.key.toLowerCase() === "u" && !event.ctrlKey && !event.metaKey && !event.altKey) undo();
  if (!typing && event.key === "z" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); undo(); }
});

function segments(id, key, chosen) {
  for (const button of $(id).children) {
    button.addEventListener("click", () => {
      for (const other of $(id).children) other.setAttribute("aria-pressed", String(other === button));
      chosen(button.dataset[key]);
    });
  }
}
segments("tool", "tool", value => { tool = value; });
segments("view", "view", value => {
  view = value;
  mesh.svg.classList.toggle("show-steps", view === "steps");
  $("player").hidden = view !== "steps";
  $("film").hidden = view !== "steps" || !film;
  showLegend(view, view === "steps" && film ? film.order.map(number => film.phases[number]) : []);
  if (view === "steps") { showSteps(); player.resize(); } else player.pause();
});

// Taking it along

function saveAs(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

let fading = null;
function toast(text) {
  $("toast").textContent = text;
  clearTimeout(fading);
  fading = setTimeout(() => { $("toast").textContent = ""; }, 2500);
}

async function copy(text, what) {
  try { await navigator.clipboard.writeText(text); toast(`${what} copied.`); } catch { toast(`The browser does not let the page copy. ${what}: ${text}`); }
}
$("copy-link").addEventListener("click", () => copy(location.href, "Link"));
$("copy-command").addEventListener("click", () => copy($("command").textContent, "Command"));
$("export-svg").addEventListener("click", () => saveAs(new Blob([mesh.picture(last?.mesh ?? state.shape)], {type: "image/svg+xml"}), `meshmend-${state.shape}.svg`));
$("export-plan").addEventListener("click", async () => {
  try { saveAs(await download("plan", states.question(state)), `meshmend-${state.shape}.npz`); } catch (error) { notice(error.message); }
});
// Themes: the system's, until the button says otherwise.

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
function kept() { try { return localStorage.getItem("theme"); } catch { return null; } }
function applyTheme() {
  const theme = kept() ?? (prefersDark.matches ? "dark" : "light");
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "Light" : "Dark";
  if (film) player.paint();
}
prefersDark.addEventListener("change", applyTheme);
$("theme").addEventListener("click", () => {
  try { localStorage.setItem("theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark"); } catch { /* private window: for this page only */ }
  applyTheme();
});

addEventListener("hashchange", () => { past.push(states.write(state, defaults)); become(fromFragment(location.hash)); });
applyTheme();
showLegend(view);
become(state);
