// Elements are built only from text and other elements, so input is never parsed as markup.

/** Build an element; children are text or elements, and null is ignored. */
function el(name, attributes, ...children) {
  return build(document.createElement(name), attributes, children);
}

function svg(name, attributes, ...children) {
  return build(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function build(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children.filter((child) => child !== null));
  return node;
}

/** Replace an element's children, changing only what differs, to keep selection, focus and scroll position. */
function fill(id, ...children) {
  const node = document.getElementById(id);
  const fresh = node.cloneNode(false);
  fresh.append(...children.filter((child) => child !== null));
  update(node, fresh);
}

function update(node, fresh) {
  if (node.isEqualNode(fresh)) return;
  if (node.nodeName !== fresh.nodeName) {
    node.replaceWith(fresh);
  } else if (node.nodeType === Node.TEXT_NODE) {
    node.data = fresh.data;
  } else {
    for (const name of node.getAttributeNames()) if (!fresh.hasAttribute(name)) node.removeAttribute(name);
    for (const name of fresh.getAttributeNames()) node.setAttribute(name, fresh.getAttribute(name));
    const [old, children] = [[...node.childNodes], [...fresh.childNodes]];
    old.slice(children.length).forEach((child) => child.remove());
    children.forEach((child, index) => (index < old.length ? update(old[index], child) : node.append(child)));
  }
}

function time(at, now) {
  if (!isTime(at)) return NONE;
  const utc = new Date(at * 1000).toISOString();
  return el("time", { datetime: utc, title: `${utc.slice(0, 19).replace("T", " ")} UTC` }, clock(at, now));
}

/** Build an element of untrusted text, shortened in the middle, as both ends of a path matter; the title is complete. */
function quoted(text, limit = 100) {
  const whole = visible(text);
  const letters = Array.from(whole);
  if (letters.length <= limit) return el("bdi", {}, whole);
  const [head, tail] = [Math.floor(limit / 3), Math.ceil((limit * 2) / 3)];
  return el("bdi", { title: whole }, `${letters.slice(0, head).join("")} \u2026 ${letters.slice(-tail).join("")}`);
}
