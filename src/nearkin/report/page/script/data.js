/* The data of the page, the state of the map, and helpers for elements. */

const SHAPES = [
  "M1 0A1 1 0 1 1-1 0A1 1 0 1 1 1 0z", // a disk
  "M-.85-.85h1.7v1.7h-1.7z",
  "M0-1.15l1.1 1.95h-2.2z",
  "M0-1.25l1.25 1.25l-1.25 1.25l-1.25-1.25z",
  "M0 1.15l-1.1-1.95h2.2z",
  "M-.4-1.15h.8v.75h.75v.8h-.75v.75h-.8v-.75h-.75v-.8h.75z",
  "M0-.5l.65-.65l.5.5l-.65.65l.65.65l-.5.5l-.65-.65l-.65.65l-.5-.5l.65-.65l-.65-.65l.5-.5z",
].map((path) => new Path2D(path));
const COLORS = 10; // coprime to the number of shapes: both together give 70 classes
const SCALE_STEPS = 64; // of the color scale of numbers
const PADDING = 36; // pixels between the outermost points and the edge of the map
const MAX_RADIUS = 7; // of a point
const MIN_HALO = 1.5; // radius of a point that has a shape and a halo
const CLICK_DISTANCE = 14; // pixels between a point and a click on it
const IMAGE_ZOOM = 2; // from this zoom on, points become images
const MAX_IMAGES = 1500; // with more in view, they stay points
const MAX_SHEETS = 100; // that are kept decoded
const GALLERY = 24; // images of a section of the panel; the grid has all
const GRID_PAGE = 200;
const TABLE_PAGE = 50;

function decodeBase64(text) {
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length);
  for (let at = 0; at < bytes.length; at++) bytes[at] = characters.charCodeAt(at);
  return bytes;
}

const array = ({ kind, data }) => new globalThis[kind](decodeBase64(data).buffer);

function readDetails({ names, neighbors, similarity }) {
  return { names, neighbors: array(neighbors), similarity: array(similarity) };
}

/* What a coloring hides: classes that are switched off in the legend, -1 being "unknown"; or all
   numbers outside of a range. */
const NO_FILTER = () => ({ hidden: new Set(), range: null });

const data = JSON.parse(document.getElementById("images").textContent);
for (const name of ["number", "xy", "regions"]) data[name] = array(data[name]);
for (const coloring of data.colorings) {
  Object.assign(coloring, { values: array(coloring.values), ...NO_FILTER() });
}
data.count = data.number.length;
data.perFile ??= data.count; // images whose details lie together

const { site } = document.documentElement.dataset;
const served = Boolean(site);
const $ = (name) => document.getElementById(`map-${name}`);
const canvas = $("canvas");
const pen = canvas.getContext("2d");
const narrow = matchMedia("(max-width: 54rem)");
const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
const dark = matchMedia("(prefers-color-scheme: dark)");

/* Images are rows of the data; -1 is none. */
const state = {
  coloring: 0,
  visible: new Uint8Array(data.count).fill(1),
  highlighted: null, // the class under the pointer in the legend
  open: -1, // the image in the panel
  cursor: -1, // the image that the keyboard is at
  selected: new Set(),
  labeled: [], // images that somebody has labeled here
  lasso: null, // points of the line that is being drawn
  lassoMode: false, // whether dragging draws a lasso instead of panning
  query: null, // coordinates of the image that was searched for
  animation: null,
  view: { x: 0, y: 0, scale: 1 }, // center, and pixels per unit
  sort: { by: "number", descending: false }, // of the grid and the table
};

/* Names and neighbors, of a few thousand images each: in the page, or in files beside it, which are
   scripts, as a page from a disk can load nothing else. */
const details = data.details ? [readDetails(data.details)] : [];
const arrivals = [];
const detailsOf = (i) => details[Math.floor(i / data.perFile)];
const name = (i) => escapeInvisible(rawName(i));
const rawName = (i) => detailsOf(i)?.names[i % data.perFile] ?? "…";
const similarity = (i, j) => {
  return detailsOf(i).similarity[(i % data.perFile) * data.k + j] / data.similaritySteps;
};
const neighbors = (i) => {
  const at = i % data.perFile;
  return detailsOf(i).neighbors.subarray(at * data.k, (at + 1) * data.k);
};

globalThis.nearkinDetails = (at, json) => { details[at] = readDetails(json); };

/* Waits until the details of these images are there; false where some cannot be loaded, which are then
   asked for again the next time. */
async function loaded(members) {
  const missing = new Set();
  for (const i of members) if (!detailsOf(i)) missing.add(Math.floor(i / data.perFile));
  const arrived = await Promise.all(Array.from(missing, (at) => arrivals[at] ??= arrival(at)));
  return arrived.every(Boolean);
}

function arrival(at) {
  return new Promise((resolve) => {
    const onload = () => resolve(true);
    const onerror = () => { delete arrivals[at]; lackFiles(); resolve(false); };
    document.head.append(make("script", { src: `${data.files}/${at}.js`, onload, onerror }));
  });
}

const NO_ANSWER = "No answer. Is nearkin explore still running?";

function lackFiles() {
  if (served) showStatus(NO_ANSWER);
  else $("note").textContent = `Images and names are missing: put the folder ${decoded(data.files)} beside this page.`;
}

/* The name that an address is of; one that is not UTF-8 stays as it is there. */
function decoded(address) {
  try {
    return escapeInvisible(decodeURIComponent(address));
  } catch {
    return address;
  }
}

const hasClasses = ({ values }) => !(values instanceof Float32Array);
const withRole = (role) => data.colorings.find((coloring) => coloring.role === role);
const currentColoring = () => data.colorings[state.coloring];
const allRows = () => Array.from({ length: data.count }, (_, i) => i);
const visibleRows = () => allRows().filter((i) => state.visible[i]);

function className({ classes }, each) {
  return each < 0 ? "unknown" : escapeInvisible(classes[each]);
}

function value(coloring, i) {
  const value = coloring.values[i];
  if (hasClasses(coloring)) return className(coloring, value);
  return Number.isNaN(value) ? "unknown" : value.toFixed(3);
}

/* The entry of an image in the legend, where the coloring has classes. */
function classOf(i, coloring = currentColoring()) {
  return coloring && hasClasses(coloring) ? Math.max(-1, coloring.values[i]) : -1;
}

/* File names are hostile: they reach the page as text nodes only, and what cannot be seen in them
   is escaped as Python's `text` does, so that a name cannot pose as another. */
function escapeInvisible(text) {
  return text.replace(/(?<![\u0300-\u{10ffff}])[\u200c\u200d]|(?![\u200c\u200d\p{Zs}])[\p{C}\p{Z}]/gu, (character) => {
    const short = { "\n": "\\n", "\r": "\\r", "\t": "\\t" }[character];
    const code = character.codePointAt(0);
    const [kind, digits] = code < 0x100 ? ["x", 2] : code < 0x10000 ? ["u", 4] : ["U", 8];
    return short ?? `\\${kind}${code.toString(16).padStart(digits, "0")}`;
  });
}

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const note = (...children) => make("p", { className: "note" }, ...children);
const buttons = (...children) => make("div", { className: "map-buttons" }, ...children);

function button(content, onclick, properties = {}) {
  return make("button", { type: "button", onclick, ...properties }, ...[content].flat());
}

function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

/* For screen readers. */
function announce(text) {
  $("live").textContent = text;
}
