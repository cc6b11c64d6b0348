// The state: what the page asks about, in the words of the command line. It lives in the address, after the #.

// Chips and cables are held one by one, so that a click is a change of one entry: `failed` has the names of chips
// ("2,3"), `cables` the rate of each cable that is not whole ("0" is a dead one).
export function empty(defaults) {
  return {...defaults, failed: new Set(), cables: new Map()};
}

export function read(fragment, defaults) {
  const words = new URLSearchParams(fragment.replace(/^#/, ""));
  const state = empty(defaults);
  for (const name of ["shape", "wrap", "hardware", "payload", "planner"]) {
    if (words.has(name)) state[name] = words.get(name);
  }
  if (words.has("budget")) state.budget = Number(words.get("budget")) || defaults.budget;
  state.failed = new Set(words.getAll("fail").flatMap(chipsOf));
  state.cables = new Map([...words.getAll("fail-cable").map(name => [name, "0"]), ...words.getAll("cable-rate").map(text => text.split("="))]);
  return state;
}

// The chips of a box such as 2x2@4,6, or of one chip.
export function chipsOf(text) {
  const [shape, at] = text.includes("@") ? text.split("@") : [null, text];
  const corner = at.split(",").map(Number);
  const sides = shape ? shape.split("x").map(Number) : corner.map(() => 1);
  if (sides.reduce((a, b) => a * b, 1) > 1e5) return [];
  return sides.reduce((found, side, axis) => found.flatMap(chip => Array.from({length: side}, (_, i) => [...chip, corner[axis] + i])), [[]]).map(chip => chip.join(","));
}

// Failed chips as boxes: along the last axis first, and equal runs of neighbouring rows together.
export function boxes(failed) {
  const left = new Set(failed), found = [];
  const chips = [...failed].map(name => name.split(",").map(Number)).sort((a, b) => { for (let i = 0; i < a.length; i++) if (a[i] !== b[i]) return a[i] - b[i]; return 0; });
  for (const chip of chips) {
    if (!left.has(chip.join(","))) continue;
    const n = chip.length, sides = chip.map(() => 1);
    for (let axis = n - 1; axis >= 0; axis--) {
      for (;;) {
        const slab = sides.slice(), corner = chip.slice();
        slab[axis] = 1;
        corner[axis] += sides[axis];
        if (!chipsOf(slab.join("x") + "@" + corner.join(",")).every(name => left.has(name))) break;
        sides[axis]++;
      }
    }
    const box = sides.join("x") + "@" + chip.join(",");
    chipsOf(box).forEach(name => left.delete(name));
    found.push(sides.every(side => side === 1) ? chip.join(",") : box);
  }
  return found;
}

const dead = state => [...state.cables].filter(([, rate]) => rate === "0").map(([name]) => name).sort();
const slow = state => [...state.cables].filter(([, rate]) => rate !== "0").map(([name, rate]) => `${name}=${rate}`).sort();

export function question(state) {
  const {shape, wrap, hardware, payload, planner, budget} = state;
  return {shape, wrap, hardware, payload, planner, budget, fail: boxes(state.failed), fail_cable: dead(state), cable_rate: slow(state)};
}

export function write(state, defaults) {
  const words = [["shape", state.shape]];
  for (const name of ["wrap", "hardware", "payload", "planner", "budget"]) {
    if (String(state[name]) !== String(defaults[name])) words.push([name, state[name]]);
  }
  for (const box of boxes(state.failed)) words.push(["fail", box]);
  for (const name of dead(state)) words.push(["fail-cable", name]);
  for (const text of slow(state)) words.push(["cable-rate", text]);
  return words.map(([name, value]) => name + "=" + encodeURIComponent(value).replace(/%(2C|40|3D|2F)/g, decodeURIComponent)).join("&");
}

export const isWhole = state => !state.failed.size && !state.cables.size;
