"use strict";
// Read-outs under the pointer. All text was formatted when the page was written; without this
// script the page shows the same figures in the tables below the charts.
for (const figure of document.querySelectorAll("figure[data-readout]")) {
  const data = JSON.parse(figure.dataset.readout);
  const plot = figure.querySelector(".plot");
  const cursor = figure.querySelector(".cursor");
  const output = document.createElement("p");
  output.className = "readout";
  figure.querySelector(".frame").after(output);
  let index = data.x.length - 1;

  const show = (place) => {
    index = place;
    const at = 100 * data.x[index] + "%";
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    cursor.setAttribute("visibility", "visible");
    const values = data.series.filter((row) => row[index + 1] !== "").map((row) => row[0] + " " + row[index + 1]);
    output.textContent = data.label[index] + ": " + values.join(" · ");
  };
  const hide = () => {
    cursor.setAttribute("visibility", "hidden");
    output.textContent = "";
  };
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const place = (event.clientX - box.left) / box.width;
    let nearest = 0;
    data.x.forEach((x, i) => {
      if (Math.abs(x - place) < Math.abs(data.x[nearest] - place)) nearest = i;
    });
    show(nearest);
  });
  plot.addEventListener("pointerleave", hide);
  plot.setAttribute("tabindex", "0");
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    show(Math.min(data.x.length - 1, Math.max(0, index + step)));
  });
}
