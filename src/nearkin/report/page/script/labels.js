/* Labels of single images: shown wherever there are some, given by keys where there is a server. */

const labels = {
  keys: [], // the classes of the number keys
  undo: [], // what each change replaced: images by the label that they had
  saving: Promise.resolve(), // changes are saved in turn
};

function rawLabel(i) {
  const { classes, values } = withRole("label") ?? { classes: [], values: [] };
  return classes[values[i]] ?? "";
}

function findLabeled() {
  const { values } = withRole("label") ?? { values: [] };
  state.labeled = allRows().filter((i) => values[i] >= 0);
}

/* Shows labels by the numbers of their images. */
function showLabels(byNumber) {
  const coloring = withRole("label");
  setClasses(coloring, coloring.classes, (number) => byNumber[number]);
  findLabeled();
  setColoring(state.coloring);
  suggestNames();
  showTable();
  updatePanel();
}

/* The images that a label is for: the selected ones, or that of the cursor. Those that came to a
   discovery with a class keep it. */
function rowsToLabel() {
  const members = state.selected.size ? [...state.selected] : [state.cursor].filter((i) => i >= 0);
  return members.filter((i) => !runClasses.editable || data.number[i] in runClasses.cluster_of);
}

/* Labels images, and moves on to the next; "" removes their labels. */
async function giveLabel(text) {
  const rows = rowsToLabel();
  if (!rows.length) throw new Error("Select unlabeled images, or move to one, first.");
  if (grid.on && !state.selected.size) goTo(grid.rows.indexOf(state.cursor) + 1);
  await inTurn(async () => {
    const before = Map.groupBy(rows, rawLabel);
    await saveLabels(new Map([[text, rows]]));
    labels.undo.push(before);
    if (!text || labels.keys.includes(text)) return;
    labels.keys.splice(9, 1, text);
    showKeys();
  });
  return `${count(rows.length, "image")} ${text ? `labeled ${text}` : "without a label now"}.`;
}

async function undoLabel() {
  await inTurn(async () => {
    const before = labels.undo.at(-1);
    if (!before) throw new Error("Nothing to undo.");
    await saveLabels(before);
    labels.undo.pop();
  });
  return "The last label is undone.";
}

/* Each change sees what those before it have saved: keys are pressed faster than a server answers. */
function inTurn(change) {
  return labels.saving = labels.saving.catch(() => {}).then(change).finally(() => {
    $("undo").disabled = !labels.undo.length;
  });
}

async function saveLabels(changes) {
  for (const [text, rows] of changes) {
    const numbers = rows.map((i) => data.number[i]);
    const answer = await request("label", { numbers, name: text });
    showLabels(answer.labels);
  }
}

/* What a key does, if it labels. */
function labelKey(key) {
  if (!runClasses) return undefined;
  if (key === "u") return () => attempt(undoLabel);
  const text = /^[0-9]$/.test(key) ? labels.keys[(Number(key) + 9) % 10] : undefined;
  return text === undefined ? undefined : () => attempt(() => giveLabel(text));
}

/* The bar is made once, so that the focus and what is typed stay. The number keys begin with the labels
   in use, the most frequent first; then come the classes. */
function startLabels() {
  const { classes, values } = withRole("label");
  const uses = new Map(classes.map((name, at) => [name, values.filter((each) => each === at).length]));
  const used = [...uses.keys()].sort((a, b) => uses.get(b) - uses.get(a));
  labels.keys = [...new Set([...used, ...classNames()])].slice(0, 10);
  $("labels").append(
    make("span", {}, "Label"),
    make("span", { id: "map-label-keys" }),
    textForm("Label of the images", "Label", giveLabel, { suggest: true }),
    button("Remove label", () => attempt(() => giveLabel(""))),
    button([make("kbd", {}, "u"), "Undo"], () => attempt(undoLabel), { id: "map-undo", disabled: true }));
  $("labels").hidden = false;
  showKeys();
}

/* Those of the data; of a discovery, names that people have given, and of known classes: an unnamed
   cluster is no class yet. */
function classNames() {
  if (!runClasses.editable) return withRole("class")?.classes ?? [];
  const named = runClasses.classes.filter((each) => each.name || each.kind === "known");
  return [...new Set(named.map((each) => each.name || each.cluster))];
}

function suggestNames() {
  const names = new Set([...classNames(), ...withRole("label").classes]);
  $("names").replaceChildren(...Array.from(names, (value) => make("option", { value })));
}

function showKeys() {
  $("label-keys").replaceChildren(...labels.keys.map((text, at) => button(
    [make("kbd", {}, String((at + 1) % 10)), make("bdi", {}, escapeInvisible(text))],
    () => attempt(() => giveLabel(text)))));
}
