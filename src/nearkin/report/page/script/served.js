/* What only works with a server behind the page: asking for more images, and changing the run. */

let told = null; // the classes as the run has them now
let classesAtFirst = []; // of every image, as the page came

async function ask(path, body) {
  const sent = body instanceof Blob ? body : JSON.stringify(body);
  const answer = await fetch(path, body === undefined ? {} : { method: "POST", body: sent });
  const said = await answer.json();
  if (!answer.ok) throw new Error(said.error);
  return said;
}

/* Whatever goes wrong is told where the reader looks. */
async function attempt(action) {
  try {
    notify(await action());
  } catch (error) {
    const gone = error instanceof TypeError;
    notify(gone ? "There is no answer. Is nearkin explore still running?" : error.message);
  }
}

function notify(text = "") {
  $("status").textContent = visible(text);
}

/* A line of text that is wanted, and the button that sends it. */
function question(label, verb, action, { text = "", empty = false } = {}) {
  const input = make("input", {
    type: "text", value: text, placeholder: label, maxLength: 100, required: !empty,
    autocomplete: "off", "aria-label": label,
  });
  const form = make("form", { className: "map-buttons" }, input, make("button", {}, verb));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    attempt(() => action(input.value.trim()));
  });
  return form;
}

/* ---- search ---- */

function searchBox() {
  const input = make("input", { type: "file", accept: "image/*" });
  input.addEventListener("change", () => input.files.length && search(input.files[0]));
  canvas.addEventListener("dragover", (event) => event.preventDefault());
  canvas.addEventListener("drop", (event) => {
    event.preventDefault();
    const [file] = event.dataTransfer.files;
    if (file) search(file);
  });
  return make("label", {}, "Search with an image ", input);
}

function search(file) {
  return attempt(async () => {
    notify("Searching …");
    const found = await ask("/search", file);
    close();
    state.found = found.place;
    showFound(file, found.neighbors);
    if (found.place) glide({ ...state.view, x: found.place[0], y: found.place[1] });
    else redraw();
    const where = found.place ? "A cross marks where it lies on the map." : "";
    return `${count(found.neighbors.length, "similar image")} found. ${where}`;
  });
}

function showFound(file, neighbors) {
  const shown = make("img", { alt: "Your image", src: URL.createObjectURL(file) });
  shown.addEventListener("load", () => URL.revokeObjectURL(shown.src));
  const similar = make("ul", { className: "map-tiles" }, ...neighbors.map(foundTile));
  $("panel").replaceChildren(
    make("h3", { tabIndex: -1 }, "Your image"),
    button("Close", close, { className: "map-close" }),
    make("div", { className: "map-large" }, shown),
    make("h4", {}, "Most like it"),
    similar,
  );
  $("panel").querySelector("h3").focus();
}

/* One that the map does not show, because it is a sample, can be looked at by itself. */
function foundTile({ number, name: path, label, similarity: near }) {
  const said = [visible(path), visible(label ?? ""), near.toFixed(2)].filter(Boolean).join(", ");
  const at = positions.get(number);
  const how = { title: said, "aria-label": said };
  const shown = at === undefined
    ? make("a", { ...how, href: `/image/${number}`, target: "_blank" },
      make("img", { src: `/thumbnail/${number}`, alt: "" }))
    : button(tile(at), () => open(at), how);
  shown.append(make("span", {}, near.toFixed(2)));
  return make("li", {}, shown);
}

/* ---- classes ---- */

async function edit(path, change, done) {
  regroup(await ask(path, change));
  return done;
}

/* Classes of one name are one. Images that the run has not sorted keep the class they have. */
function regroup(answer) {
  told = answer;
  const coloring = data.colorings.find((each) => each.name === "Class" && byClass(each));
  if (told.editable && coloring) {
    const called = new Map(told.classes.map((each) => [each.cluster, each.name || each.cluster]));
    const group = (held) => called.get(held) ?? held;
    const groups = new Map();
    const numbered = (held) => {
      if (!groups.has(held)) groups.set(held, groups.size);
      return groups.get(held);
    };
    for (const held of coloring.found ??= coloring.classes) numbered(group(held));
    coloring.values = Int32Array.from(data.number, (number, i) => {
      const held = told.cluster_of[number] ?? classesAtFirst[i];
      return held === undefined ? -1 : numbered(group(held));
    });
    coloring.classes = [...groups.keys()];
  }
  words = null;
  recolor(state.coloring);
  showPanel();
  showSelection();
  showClasses();
}

function rememberClasses() {
  const coloring = data.colorings.find((each) => each.name === "Class" && byClass(each));
  classesAtFirst = coloring ? Array.from(coloring.values, (of) => coloring.classes[of]) : [];
}

function showClasses() {
  const section = $("classes");
  section.hidden = !told.editable;
  const novel = told.classes.filter((each) => each.kind === "novel");
  const rows = novel.map(classRow);
  const ticked = () => novel.filter((_, at) => rows[at].querySelector("input").checked);
  const merge = question("Name of the one class", "Merge the ticked ones", (text) => {
    const clusters = ticked().map((each) => each.cluster);
    if (clusters.length < 2) throw new Error("Tick two classes or more first.");
    return edit("/name", { clusters, name: text }, `${clusters.join(", ")} are now ${text}.`);
  });
  const copy = question("Name of a new folder", "Copy all images, by class", (folder) => {
    return exported(folder, null);
  });
  section.replaceChildren(
    make("summary", {}, "Name, merge and export the classes"),
    make("p", { className: "note" }, "Saved in the run at once. Classes of one name are one; "
      + "give a new class the name of a known one if it is the same. To split a class, select "
      + "images on the map."),
    make("ul", { className: "map-classes" }, ...rows),
    merge,
    copy,
  );
}

function classRow({ cluster, name: text, size }) {
  const tick = make("input", { type: "checkbox", "aria-label": `Merge ${visible(cluster)}` });
  const naming = question(`Name of ${visible(cluster)}`, "Save", (given) => {
    return edit("/name", { clusters: [cluster], name: given }, `${cluster} is now ${given || "without a name"}.`);
  }, { text, empty: true });
  return make("li", {}, tick, make("bdi", {}, visible(cluster)),
    make("span", {}, count(size, "image")), naming);
}

async function exported(folder, numbers) {
  const { folder: path, images: copied } = await ask("/export", { folder, numbers });
  return `${count(copied, "image")} copied to ${path}`;
}

/* What can be done with selected images besides saving their names. */
function servedSelection(members) {
  const numbers = members.map((i) => data.number[i]);
  const copy = question("Name of a new folder", "Copy the images", (folder) => {
    return exported(folder, numbers);
  });
  const split = question("Name of the new class", "Make them a class", (text) => {
    return edit("/split", { numbers, name: text }, `${count(numbers.length, "image")} split off.`);
  });
  return told?.editable ? [copy, split] : [copy];
}

function serve() {
  $("count").before(searchBox());
  $("served").append(make("details", { id: "map-classes", hidden: true }));
  $("view").append(make("p", { id: "map-status", role: "status" }));
  rememberClasses();
  attempt(async () => regroup(await ask("/classes")));
}
