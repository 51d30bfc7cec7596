/* Search, comparison, and edits of classes: what needs a server behind the page. */

let runClasses = null; // the classes as they are in the run now

async function request(path, body) {
  const content = body instanceof Blob ? body : JSON.stringify(body);
  const headers = { "X-Nearkin-Site": site };
  const how = body === undefined ? {} : { method: "POST", body: content, headers };
  const answer = await fetch(path, how).catch(() => {
    throw new Error(NO_ANSWER);
  });
  const json = await answer.json();
  if (!answer.ok) throw new Error(json.error);
  return json;
}

/* Shows the result of an action, or its error. */
async function attempt(action) {
  try {
    showStatus(await action());
  } catch (error) {
    showStatus(error.message);
  }
}

function showStatus(text = "") {
  $("status").textContent = escapeInvisible(text);
}

/* A line of text with a button that submits it. What was typed stays until that has succeeded; a
   name, which may be empty, stays for good. */
function textForm(label, verb, action, { isName = false, suggest = false } = {}) {
  const input = make("input", {
    type: "text", placeholder: label, maxLength: 100, autocomplete: "off", ariaLabel: label,
  });
  if (suggest) input.setAttribute("list", "map-names");
  const onsubmit = (event) => {
    event.preventDefault();
    attempt(async () => {
      const text = input.value.trim();
      if (!text && !isName) throw new Error("Type a name first.");
      const done = await action(text);
      if (!isName && input.value.trim() === text) input.value = "";
      return done;
    });
  };
  return make("form", { className: "map-buttons", onsubmit }, input, make("button", {}, verb));
}

/* ---- search ---- */

function searchBox() {
  const searchFirst = ([file]) => { if (file) search(file); };
  const onchange = (event) => searchFirst(event.target.files);
  canvas.ondragover = (event) => event.preventDefault();
  canvas.ondrop = (event) => { event.preventDefault(); searchFirst(event.dataTransfer.files); };
  const input = make("input", { type: "file", accept: "image/*", onchange });
  return make("label", {}, "Search by image ", input);
}

function search(file) {
  return attempt(async () => {
    showStatus("Searching …");
    const { xy, neighbors: results } = await request("search", file);
    close();
    state.query = xy;
    const src = URL.createObjectURL(file);
    const image = make("img", { alt: "Your image", src, onload: () => URL.revokeObjectURL(src) });
    fillPanel("Your image", make("div", { className: "map-large" }, image),
      make("h4", {}, "Nearest neighbors"), tiles(results.map(resultTile)));
    $("panel").querySelector("h3").focus();
    if (xy) animateTo({ ...state.view, x: xy[0], y: xy[1] });
    else redraw();
    const cross = xy ? " A cross marks your image on the map." : "";
    return `${count(results.length, "nearest neighbor")} found.${cross}`;
  });
}

/* If the map is a sample that lacks a result, the image opens in a new tab. */
function resultTile({ number, name: path, label, similarity: cosine }) {
  const texts = [escapeInvisible(path), escapeInvisible(label ?? ""), cosine.toFixed(2)];
  const title = texts.filter(Boolean).join(", ");
  const i = data.number.indexOf(number);
  if (i >= 0) return galleryItem(i, title, cosine.toFixed(2));
  return make("a", { title, ariaLabel: title, href: `image/${number}`, target: "_blank" },
    make("img", { src: `image/${number}`, alt: "" }), make("span", {}, cosine.toFixed(2)));
}

/* ---- where two images are alike ---- */

/* Shows it, or hides it if it is shown already. */
async function showLikeness(i, other, pressed) {
  const [shown, isShown] = [$("likeness"), pressed.ariaPressed === "true"];
  for (const each of $("panel").querySelectorAll(".map-where")) each.ariaPressed = each === pressed && !isShown;
  shown.replaceChildren(...(isShown ? [] : [note("Comparing …")]));
  if (isShown) return;
  const found = await likeness(i, other).catch((error) => [note(escapeInvisible(error.message))]);
  if (pressed.ariaPressed !== "true") return; // another one meanwhile
  shown.replaceChildren(...found);
  shown.scrollIntoView({ block: "nearest" });
}

async function likeness(...pair) {
  const [number, other] = pair.map((i) => data.number[i]);
  const { images, low, high } = await request("likeness", { number, other });
  const alts = pair.map((i, at) => `Where ${name(i)} is like ${name(pair[1 - at])}`);
  const maps = images.map((src, at) => make("img", { src, alt: alts[at] }));
  return [
    make("div", { className: "map-pair" }, ...maps),
    note(`How like each place is to the other image: cosines from ${low.toFixed(2)} (violet) to ${high.toFixed(2)} (yellow).`),
  ];
}

/* ---- classes ---- */

async function edit(path, change, done) {
  updateClasses(await request(path, change));
  return done;
}

/* Clusters of one name are one class. Labeled images keep the class they came with. */
function updateClasses(answer) {
  const isFirst = !runClasses;
  runClasses = answer;
  const coloring = withRole("class");
  if (runClasses.editable && coloring) {
    const names = new Map(runClasses.classes.map((each) => [each.cluster, each.name || each.cluster]));
    const nameOf = (cluster) => names.get(cluster) ?? cluster;
    const { classes, values } = coloring.first ??= { ...coloring }; // as the page was made
    setClasses(coloring, classes.map(nameOf),
      (number, i) => nameOf(runClasses.cluster_of[number] ?? classes[values[i]]));
  }
  showLabels(runClasses.labels);
  updateVisible();
  if (isFirst) showSelection(); // which has forms only now
  showClasses();
}

/* Rows stay, with the focus and with what is typed and ticked in them. */
function showClasses() {
  const rows = $("classes").querySelector("ul");
  $("classes").hidden = !runClasses.editable;
  const novel = runClasses.classes.filter(({ kind }) => kind === "novel");
  for (const row of [...rows.children]) {
    if (!novel.some(({ cluster }) => cluster === row.dataset.cluster)) row.remove();
  }
  for (const { cluster, name, size } of novel) {
    const same = ({ dataset }) => dataset.cluster === cluster;
    const row = [...rows.children].find(same) ?? rows.appendChild(classRow(cluster));
    const text = row.querySelector("form input");
    if ([row.dataset.name, name].includes(text.value.trim())) text.value = name;
    row.dataset.name = name;
    row.querySelector("span").textContent = count(size, "image");
  }
}

function classSection() {
  const rows = make("ul", { className: "map-classes" });
  const ticks = () => [...rows.querySelectorAll("li > :checked")];
  const merge = textForm("Name of the merged class", "Merge selected classes", async (text) => {
    const clusters = ticks().map((tick) => tick.parentElement.dataset.cluster);
    if (clusters.length < 2) throw new Error("Select two or more classes first.");
    const done = await edit("name", { clusters, name: text }, `${clusters.join(", ")} are now ${text}.`);
    for (const tick of ticks()) tick.checked = false;
    return done;
  }, { suggest: true });
  return make("details", { id: "map-classes", hidden: true },
    make("summary", {}, "Name, merge and export classes"),
    note("Saved in the run at once. Classes with the same name are one class; give a novel class "
      + "the name of a known one if they are the same. To split a class, select images on the map."),
    rows,
    merge,
    exportForm("Copy all images by class", null),
  );
}

function classRow(cluster) {
  const label = escapeInvisible(cluster);
  const tick = make("input", { type: "checkbox", ariaLabel: `Merge ${label}` });
  const rename = textForm(`Name of ${label}`, "Save", (entered) => {
    const done = entered ? `${cluster} is now ${entered}.` : `${cluster} has no name now.`;
    return edit("name", { clusters: [cluster], name: entered }, done);
  }, { isName: true, suggest: true });
  const row = make("li", {}, tick, make("bdi", {}, label), make("span"), rename);
  Object.assign(row.dataset, { cluster, name: "" });
  return row;
}

function exportForm(verb, numbers) {
  return textForm("Name of a new folder", verb, async (folder) => {
    const { folder: path, images } = await request("export", { folder, numbers });
    return `${count(images, "image")} copied to ${path}`;
  });
}

/* Actions on selected images. */
function selectionForms(members) {
  const numbers = members.map((i) => data.number[i]);
  const own = numbers.filter((number) => number in (runClasses?.cluster_of ?? {}));
  const labeled = numbers.length - own.length;
  const rest = labeled ? ` ${count(labeled, "image")} that came with a label stay.` : "";
  const split = textForm("Name of the new class", "Make a new class", (text) => {
    const done = `${count(own.length, "image")} split off.${rest}`;
    return edit("split", { numbers: own, name: text }, done);
  }, { suggest: true });
  const copy = exportForm("Copy images", numbers);
  return runClasses?.editable ? [copy, split] : [copy];
}

function connect() {
  $("count").before(searchBox());
  $("served").append(classSection());
  $("view").append(make("p", { id: "map-status", role: "status" }));
  attempt(async () => {
    updateClasses(await request("classes"));
    startLabels();
  });
}
