"use strict";
// The page's only script: sliders, sorting, filters, copy buttons. Without it everything is still there to read.

const make = (tag, attributes = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), attributes);
  element.append(...children);
  return element;
};

// What would make it pay: speed-up = AL / rho, ceiling = (K + 1) / rho (scripts/breakeven/stepcost.py).

function neededConditional(length, k) {
  // The constant conditional acceptance c with 1 + c + ... + c^K = length; null if even c = 1 falls short.
  if (length <= 1) return 0;
  if (length > k + 1) return null;
  let low = 0, high = 1;
  for (let i = 0; i < 60; i++) {
    const middle = (low + high) / 2;
    let sum = 0;
    for (let j = 0; j <= k; j++) sum += middle ** j;
    if (sum < length) low = middle; else high = middle;
  }
  return high;
}

function sliders(form) {
  const { arm, al, rho, k } = form.elements;
  const cells = name => form.querySelectorAll(`[data-out=${name}]`);
  const show = (name, text) => cells(name).forEach(cell => { cell.textContent = text; });
  const exact = {};  // as measured, until a slider is moved: the sliders' steps are coarser
  const share = value => value === null ? "out of reach" : value.toFixed(3);

  function update() {
    const K = Math.min(Math.max(Math.round(Number(k.value)) || 1, 1), Number(k.max));
    al.max = K + 1;
    const length = Math.min(exact.al ?? Number(al.value), K + 1), cost = exact.rho ?? Number(rho.value), speedup = length / cost;
    show("al", length.toFixed(2));
    show("rho", cost.toFixed(2));
    show("speedup", `${speedup.toFixed(2)}×`);
    show("ceiling", `${((K + 1) / cost).toFixed(2)}×`);
    show("conditional", share(neededConditional(length, K)));
    show("needed", share(neededConditional(cost, K)));
    show("step", length < cost ? `${(100 * (1 - length / cost)).toFixed(0)} % less time per step`
                               : `a step may take ${(100 * (length / cost - 1)).toFixed(0)} % longer`);
    const pays = speedup > 1 ? "that pays" : (K + 1) / cost <= 1 ? "no drafter can pay at this step cost and K" : "that does not pay";
    show("sentence", `With an acceptance length of ${length.toFixed(2)}, a step cost rho of ${cost.toFixed(2)} and K = ${K}: `
                     + `${speedup.toFixed(2)} times the speed of plain decoding, ${pays}.`);
    al.setAttribute("aria-valuetext", `${length.toFixed(2)} tokens per step`);
    rho.setAttribute("aria-valuetext", `${cost.toFixed(2)} plain steps`);
  }

  function prefill() {
    const { al: length, rho: cost, k: K } = arm.selectedOptions[0].dataset;
    k.value = K;
    al.max = Number(K) + 1;
    rho.max = Math.max(4, Math.ceil(Number(cost)));
    al.value = exact.al = Number(length);
    rho.value = exact.rho = Number(cost);
    update();
  }

  arm.addEventListener("change", prefill);
  for (const input of [al, rho, k]) {
    input.addEventListener("input", () => {
      delete exact[input.name];
      update();
    });
  }
  form.addEventListener("submit", event => event.preventDefault());
  form.hidden = false;
  prefill();
}

// Tables. A remark row goes with the row before it; headings of groups stay first, and groups stay apart.

function blocks(body) {
  const found = [];
  for (const row of body.rows) {
    if (row.querySelector("th[scope=rowgroup]")) continue;
    if (row.classList.contains("remark") && found.length) found[found.length - 1].push(row);
    else found.push([row]);
  }
  return found;
}

function key(row, column) {
  const cell = row.cells[column];
  if (!cell) return "";
  const text = (cell.dataset.value ?? cell.textContent).trim();
  const number = parseFloat(text.replace(/,/g, ""));
  return Number.isNaN(number) || !/^[-+±(\d.]/.test(text) ? text : number;
}

const unknown = value => value === "" || value === "–";

function sort(table, column, direction) {
  for (const body of table.tBodies) {
    const rows = blocks(body).map(block => [key(block[0], column), block]);
    rows.sort(([a], [b]) => {
      if (unknown(a) || unknown(b)) return unknown(a) - unknown(b);
      if (typeof a === "number" && typeof b === "number") return direction * (a - b);
      return direction * String(a).localeCompare(String(b), "en", { numeric: true });
    });
    for (const [, block] of rows) body.append(...block);
  }
}

function sortable(table) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = make("button", { type: "button" }, ...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const ascending = heading.getAttribute("aria-sort") !== "ascending";
      for (const other of headings) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      sort(table, column, ascending ? 1 : -1);
    });
  });
  const all = [...table.tBodies].flatMap(blocks);
  if (all.length < 4) return;
  const count = make("span", {}, "");
  count.setAttribute("role", "status");
  const field = make("input", { type: "search" });
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const block of all) {
      const text = block.map(row => row.textContent).join(" ").toLowerCase();
      const match = words.every(word => text.includes(word));
      shown += match;
      for (const row of block) row.hidden = !match;
    }
    count.textContent = words.length ? `${shown} of ${all.length} rows` : "";
  });
  const label = make("label", {}, "Filter rows ", field);
  const place = table.parentElement.classList.contains("scroll") ? table.parentElement : table;
  place.before(make("div", { className: "filter" }, label, count));
}

// Copy buttons beside command lines.

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {  // no permission, or no clipboard for pages from a file
    const area = make("textarea", { value: text });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

function copyable(block) {
  const button = make("button", { type: "button", className: "copy" }, "Copy");
  button.setAttribute("aria-label", `Copy the command line of ${block.dataset.name}`);
  const said = make("span", { className: "note" });
  said.setAttribute("role", "status");
  button.addEventListener("click", async () => {
    said.textContent = await copy(block.textContent) ? " copied" : " not copied: select the text instead";
  });
  block.before(button, said);
}

document.querySelectorAll("form.pay").forEach(sliders);
document.querySelectorAll("table.sortable").forEach(sortable);
document.querySelectorAll("pre.command").forEach(copyable);
