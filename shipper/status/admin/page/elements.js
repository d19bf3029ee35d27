// Elements are built from text and other elements only: nothing that comes in is ever read as markup.

/** Build an element; children are text or elements, and those that are null are left out. */
function el(name, attributes, ...children) {
  return built(document.createElement(name), attributes, children);
}

function svg(name, attributes, ...children) {
  return built(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function built(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children.filter((child) => child !== null));
  return node;
}

/** Give an element new children, and touch only what differs: a selection, the focus and a scroll position survive. */
function fill(id, ...children) {
  const node = document.getElementById(id);
  const fresh = node.cloneNode(false);
  fresh.append(...children.filter((child) => child !== null));
  become(node, fresh);
}

function become(node, fresh) {
  if (node.isEqualNode(fresh)) return;
  if (node.nodeName !== fresh.nodeName) {
    node.replaceWith(fresh);
  } else if (node.nodeType === Node.TEXT_NODE) {
    node.data = fresh.data;
  } else {
    for (const name of node.getAttributeNames()) if (!fresh.hasAttribute(name)) node.removeAttribute(name);
    for (const name of fresh.getAttributeNames()) node.setAttribute(name, fresh.getAttribute(name));
    const [old, wanted] = [[...node.childNodes], [...fresh.childNodes]];
    old.slice(wanted.length).forEach((child) => child.remove());
    wanted.forEach((child, index) => (index < old.length ? become(old[index], child) : node.append(child)));
  }
}

function time(at, now) {
  if (!isMoment(at)) return NONE;
  const utc = new Date(at * 1000).toISOString();
  return el("time", { datetime: utc, title: `${utc.slice(0, 19).replace("T", " ")} UTC` }, clock(at, now));
}

/** Text from outside as an element: shortened in the middle, as both ends of a path matter, with all of it at hand. */
function quoted(text, most = 100) {
  const whole = visible(text);
  const letters = Array.from(whole);
  if (letters.length <= most) return el("bdi", {}, whole);
  const [head, tail] = [Math.floor(most / 3), Math.ceil((most * 2) / 3)];
  return el("bdi", { title: whole }, `${letters.slice(0, head).join("")} \u2026 ${letters.slice(-tail).join("")}`);
}
