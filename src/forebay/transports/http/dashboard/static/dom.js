// SPDX-License-Identifier: Apache-2.0
// Makes elements. Everything that comes from the server becomes text or an attribute's value, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.setAttribute("class", value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
export const s = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);
export const $ = (id) => document.getElementById(id);

/** Sets a text only where it changes, so that selections and screen readers are left alone. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Sets an attribute only where it changes; null takes it away. */
export function mark(element, name, value) {
  if (value === null || value === undefined || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, String(value));
}

/** Puts rows into a list, and the focus back where it was. */
export function arrange(list, wanted) {
  const isSame = wanted.length === list.children.length && wanted.every((row, at) => list.children[at] === row);
  // A list under a pointer or with the focus keeps its order, or one would click beside it.
  const isHeld = wanted.length === list.children.length && list.matches(":hover, :focus-within") && wanted.every((row) => row.parentElement === list);
  if (isSame || isHeld) return;
  const focused = list.contains(document.activeElement) ? document.activeElement : null;
  list.replaceChildren(...wanted);
  if (list.contains(focused)) focused.focus({ preventScroll: true });
}

/** A row of buttons of which one is chosen. */
export function choice(host, options, chosen, onChoose) {
  const buttons = options.map(([value, label, title]) =>
    h("button", {
      type: "button",
      title,
      "aria-pressed": String(value === chosen),
      "data-value": value,
      onclick: () => {
        for (const button of buttons) mark(button, "aria-pressed", String(button.dataset.value === String(value)));
        onChoose(value);
      },
    }, label));
  host.replaceChildren(...buttons);
}

/** Reads and writes what a tab or a browser remembers; some are told to remember nothing. */
export const kept = {
  get(store, name) {
    try {
      return globalThis[store].getItem(`forebay-${name}`);
    } catch {
      return null;
    }
  },
  set(store, name, value) {
    try {
      if (value === null) globalThis[store].removeItem(`forebay-${name}`);
      else globalThis[store].setItem(`forebay-${name}`, value);
    } catch {
      // then it is forgotten with the page
    }
  },
};
