/* What the page brings, and the state it is in. */

const SHAPES = [
  null, // a disk
  [[-0.85, -0.85], [0.85, -0.85], [0.85, 0.85], [-0.85, 0.85]],
  [[0, -1.15], [1.1, 0.8], [-1.1, 0.8]],
  [[0, -1.25], [1.25, 0], [0, 1.25], [-1.25, 0]],
  [[0, 1.15], [-1.1, -0.8], [1.1, -0.8]],
  [[-0.4, -1.15], [0.4, -1.15], [0.4, -0.4], [1.15, -0.4], [1.15, 0.4], [0.4, 0.4],
    [0.4, 1.15], [-0.4, 1.15], [-0.4, 0.4], [-1.15, 0.4], [-1.15, -0.4], [-0.4, -0.4]],
  [[0, -0.5], [0.65, -1.15], [1.15, -0.65], [0.5, 0], [1.15, 0.65], [0.65, 1.15],
    [0, 0.5], [-0.65, 1.15], [-1.15, 0.65], [-0.5, 0], [-1.15, -0.65], [-0.65, -1.15]],
];
const COLORS = 8; // so that color and shape together tell 56 classes apart
const STEPS = 256; // of the scale of numbers
const PADDING = 36; // between the outermost points and the edge of the map
const LARGEST = 7; // radius of a point
const NEAR = 14; // pixels between a point and a click that still means it
const PICTURES_FROM = 2; // times enlarged, from which on points become images
const MOST_PICTURES = 1500; // points in view, above which they stay points
const GALLERY = 60;
const ROWS = 50;

const KINDS = {
  int8: Int8Array, int16: Int16Array, int32: Int32Array, float32: Float32Array,
};

function bytes(text) {
  const raw = atob(text);
  const made = new Uint8Array(raw.length);
  for (let at = 0; at < raw.length; at++) made[at] = raw.charCodeAt(at);
  return made;
}

function array({ kind, data }) {
  return new KINDS[kind](bytes(data).buffer);
}

function unpacked() {
  const held = JSON.parse(document.getElementById("images").textContent);
  for (const name of ["number", "xy", "neighbors", "similarity"]) {
    held[name] = array(held[name]);
  }
  held.colorings.forEach((coloring) => { coloring.values = array(coloring.values); });
  held.count = held.names.length;
  held.k = held.count ? held.neighbors.length / held.count : 0;
  return held;
}

const data = unpacked();
const positions = new Map(Array.from(data.number, (number, at) => [number, at]));
const served = document.documentElement.dataset.served === "true";
const $ = (name) => document.getElementById(`map-${name}`);
const canvas = $("canvas");
const pen = canvas.getContext("2d");
const narrow = matchMedia("(max-width: 54rem)");
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const dark = matchMedia("(prefers-color-scheme: dark)");

/* The whole state of the page. Images are called by their position; -1 is none. */
const state = {
  coloring: 0,
  hidden: new Set(), // classes that the legend has switched off; -1 is "unknown"
  wanted: "", // what the filter asks for
  shown: new Uint8Array(data.count).fill(1),
  marked: null, // the class under the pointer in the legend
  open: -1,
  cursor: -1,
  selected: new Set(),
  lasso: null, // points of the line that is being drawn
  drawing: false, // whether dragging draws instead of moves
  found: null, // where an image from outside lies
  motion: null, // where the map is gliding to, if it is
  view: { x: 0, y: 0, scale: 1 }, // the place in the middle, and pixels per unit
  sort: { by: "number", falls: false },
  page: 0,
};
