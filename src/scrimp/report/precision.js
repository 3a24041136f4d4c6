// The precision map: steps through the plans of a run, and shows what is known of one GEMM. All text was
// formatted when the page was written; without this script the newest plan stands there as it is.
for (const map of document.querySelectorAll("[data-precision]")) {
  const data = JSON.parse(map.dataset.precision);
  const find = (selector) => map.querySelector(selector);
  const rows = [...map.querySelectorAll(".pmap tbody tr")];
  const cells = rows.flatMap((row) => [...row.querySelectorAll("td:not(.none)")]);
  const slider = find("input");
  let plan = data.plans.at(-1);
  let selected = data.selected;

  for (const one of data.plans) {
    one.codes = [...one.formats].map((code) => parseInt(code, 36));
    one.cells = one.facts ? one.facts.split("|").map((facts) => facts.split(";")) : [];
  }
  const nameOf = (index) => [data.layers[Math.floor(index / data.gemms.length)], data.gemms[index % data.gemms.length]];
  const factsOf = (index) => {
    const [harm, loss, update, other, change, certainty] = plan.cells[index] || [];
    const layer = Math.floor(index / data.gemms.length);
    return {
      format: data.described[plan.codes[index]],
      harm, loss, update, certainty,
      other: other && data.names[parseInt(other, 36)] + ": " + change + " harm",
      flops: plan.flops && plan.flops[layer],
      reason: plan.reasons && plan.reasons[plan.reason[layer]],
    };
  };
  const sentence = (index, facts) => {
    const parts = [nameOf(index).join(" "), facts.format || data.missing];
    if (facts.harm) parts.push("harm " + facts.harm + " (predicted)");
    if (facts.other) parts.push("next best " + facts.other);
    if (facts.certainty) parts.push(facts.certainty + " certain");
    return parts.join(", ");
  };

  const select = (index) => {
    cells[selected].classList.remove("selected");
    cells[selected].tabIndex = -1;
    selected = index;
    const facts = factsOf(index);
    cells[index].classList.add("selected");
    cells[index].tabIndex = 0;
    cells[index].title = sentence(index, facts);
    cells[index].setAttribute("aria-label", cells[index].title);
    const [layer, gemm] = nameOf(index);
    find(".map-where b").textContent = layer;
    find(".map-where span").textContent = gemm;
    for (const field of map.querySelectorAll("dd[data-field]")) {
      field.textContent = facts[field.dataset.field] || data.missing;
    }
  };

  const show = (place) => {
    const before = data.plans[place - 1];
    plan = data.plans[place];
    cells.forEach((cell, index) => {
      const code = plan.codes[index];
      const words = [data.classes[code] || "q-other"];
      if (parseInt((plan.cells[index] || [])[5]) < data.unsure) words.push("unsure");
      if (before && !Number.isNaN(before.codes[index]) && before.codes[index] !== code) words.push("changed");
      cell.className = words.join(" ");
      cell.textContent = data.letters[code] || data.missing;
    });
    let start = 0;
    map.querySelectorAll(".map-bar rect").forEach((part, index) => {
      part.setAttribute("x", start + "%");
      part.setAttribute("width", plan.shares[index] + "%");
      start += plan.shares[index];
    });
    map.querySelectorAll(".map-legend b").forEach((share, index) => {
      share.textContent = plan.shares[index].toFixed(1) + "%";
    });
    find(".map-title").textContent = plan.title;
    find(".map-summary").textContent = plan.summary;
    slider.value = place;
    slider.setAttribute("aria-valuetext", plan.title);
    find(".earlier").disabled = place === 0;
    find(".later").disabled = place === data.plans.length - 1;
    select(selected);
  };

  // The cell in the same column of the nearest row above or below that has one there.
  const beside = (cell, step) => {
    for (let row = rows.indexOf(cell.parentNode) + step; rows[row]; row += step) {
      const found = rows[row].cells[cell.cellIndex];
      if (found && cells.includes(found)) return found;
    }
    return cell;
  };
  const inRow = (cell) => [...cell.parentNode.querySelectorAll("td:not(.none)")];
  const moves = {
    ArrowLeft: (cell) => cells[cells.indexOf(cell) - 1],
    ArrowRight: (cell) => cells[cells.indexOf(cell) + 1],
    ArrowUp: (cell) => beside(cell, -1),
    ArrowDown: (cell) => beside(cell, 1),
    Home: (cell) => inRow(cell).at(0),
    End: (cell) => inRow(cell).at(-1),
  };
  const body = find(".map-tables");
  const onCell = (handle) => (event) => {
    const index = cells.indexOf(event.target.closest("td"));
    if (index >= 0) handle(index, event);
  };
  body.addEventListener("pointerover", onCell(select));
  body.addEventListener("focusin", onCell(select));
  body.addEventListener("click", onCell((index) => cells[index].focus({ preventScroll: true })));
  body.addEventListener("keydown", onCell((index, event) => {
    const move = moves[event.key];
    if (!move || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const next = move(cells[index]);
    if (!next) return;
    select(cells.indexOf(next));
    next.focus();
  }));

  for (const table of map.querySelectorAll(".pmap")) table.setAttribute("role", "grid");
  find(".map-hint").hidden = false;
  select(selected);
  if (slider) {
    find(".map-steps").hidden = false;
    slider.addEventListener("input", () => show(Number(slider.value)));
    find(".earlier").addEventListener("click", () => show(data.plans.indexOf(plan) - 1));
    find(".later").addEventListener("click", () => show(data.plans.indexOf(plan) + 1));
    show(data.plans.length - 1); // a browser may have kept the slider's place over a reload
  }
}
