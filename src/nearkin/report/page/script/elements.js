/* Text and elements. Names of files are hostile: they reach the page as text nodes only. */

/* What cannot be seen is spelled out as in the rest of the page, so that a name looks like what
   it is. */
function visible(name) {
  return name.replace(/[\p{C}\p{Z}]/gu, (c) => {
    if (c === " ") return c;
    const known = { "\n": "\\n", "\r": "\\r", "\t": "\\t" }[c];
    const code = c.codePointAt(0);
    const [kind, digits] = code < 0x100 ? ["x", 2] : code < 0x10000 ? ["u", 4] : ["U", 8];
    return known ?? `\\${kind}${code.toString(16).padStart(digits, "0")}`;
  });
}

function make(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("aria-") || name === "role" || name === "scope") {
      made.setAttribute(name, value);
    } else made[name] = value;
  }
  made.append(...children);
  return made;
}

function button(said, action, properties = {}) {
  const made = make("button", { type: "button", ...properties }, said);
  made.addEventListener("click", action);
  return made;
}

function count(number, what) {
  return `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;
}

function say(text) {
  $("said").textContent = text;
}

const name = (i) => visible(data.names[i]);
const similarity = (i, j) => data.similarity[i * data.k + j] / data.similaritySteps;
const neighbors = (i) => data.neighbors.subarray(i * data.k, (i + 1) * data.k);
