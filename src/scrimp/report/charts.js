"use strict";
// Line charts by uPlot: of every figure with data-chart one chart, as charts.py describes it. The cursor, zooming
// and steps are shared by all charts of the page.
{
  const MISSING = "–";
  const PREFIXES = { "-9": "n", "-6": "µ", "-3": "m", 0: "", 3: "k", 6: "M", 9: "B", 12: "T" };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // 3.0512 -> "3.051", 0.0000042 -> "4.2e-6"
  const written = (value, digits = 4) => {
    const rounded = Number(value.toPrecision(digits));
    const size = Math.abs(rounded);
    if (size >= 1e15 || (size && size < 1e-3)) return rounded.toExponential().replace("e+", "e");
    return rounded.toLocaleString("en", { maximumFractionDigits: 12 });
  };
  // 9712 -> "9.712k"; 0.0004, " s" -> "400 µs"
  const prefixed = (value, name, digits) => {
    const power = value ? 3 * Math.floor(Math.log10(Math.abs(Number(value.toPrecision(digits)))) / 3) : 0;
    const [least, most] = name ? [-9, 0] : [0, 12];
    const exponent = Math.min(Math.max(power, least), most);
    const number = written(value / 10 ** exponent, digits);
    return name ? number + name.replace(" ", " " + PREFIXES[exponent]) : number + PREFIXES[exponent];
  };
  const steps = (value) => (value < 10_000 ? written(value, 15) : prefixed(value, "", 6));

  // Round numbers of a logarithmic axis: of decades, thirds, 1-2-5 and so on, the first that give three ticks.
  const logTicks = (low, high) => {
    const [first, last] = [low, high].map((end) => Math.floor(Math.log10(end)));
    const fine = (step) => Array.from({ length: Math.round(9 / step) }, (_, i) => 1 + i * step);
    let ticks = [];
    for (const factors of [[1], [1, 3], [1, 2, 5], fine(1), fine(0.1), fine(0.01)]) {
      ticks = [];
      for (let power = first; power <= last; power++)
        for (const factor of factors) ticks.push(Number(factor.toFixed(2) + "e" + power));
      ticks = ticks.filter((tick) => tick >= low && tick <= high);
      if (ticks.length >= 3) break;
    }
    const every = Math.ceil(ticks.length / 6);
    return ticks.filter((_, index) => index % every === 0);
  };

  // Both ends of an axis, with a little air.
  const padded = (chart, low, high) => {
    if (low === null || high === null) [low, high] = chart.log ? [0.1, 10] : [0, 1];
    if (chart.log) {
      const air = low === high ? 2 : (high / low) ** 0.05;
      return [low / air, high * air];
    }
    if (chart.zero && low >= 0) return [0, high > 0 ? high * 1.08 : 1];
    const air = low === high ? Math.max(Math.abs(high) * 0.01, 1e-12) : (high - low) * 0.05;
    return [low - air, high + air];
  };

  const joined = (chart, logSteps) => {
    const keep = (table) => table.map((column) => column.filter((_, index) => !logSteps || table[0][index] >= 1));
    return uPlot.join(chart.tables.map(keep));
  };

  // Places of values with gaps on both sides: they would leave no trace on a line.
  const alone = (values) => {
    const known = values.flatMap((value, place) => (value === undefined ? [] : [place])); // else another table's step
    return known.filter((place, i) => values[place] !== null && values[known[i - 1]] == null && values[known[i + 1]] == null);
  };

  const seriesOptions = (chart, data) => ({ name, kind, colour }, index) => {
    const stroke = css("--c" + colour);
    const last = data[index + 1].findLast((value) => value != null);
    const lone = kind === "dots" ? [] : alone(data[index + 1]);
    return {
      label: name,
      class: kind,
      stroke: { faint: stroke + "60", dots: stroke + "99" }[kind] ?? stroke,
      width: { faint: 1, dots: 1, dashed: 1.5 }[kind] ?? 2,
      dash: kind === "dashed" ? [6, 5] : undefined,
      pxAlign: 0,
      points: {
        show: kind === "dots", size: kind === "dots" && chart.tables.at(-1)[0].length < 60 ? 8 : 4, fill: stroke, stroke, width: 0,
        filter: (_, __, show) => (show || !lone.length ? null : lone),
      },
      // Away from the cursor the legend has the last values.
      value: (_, value, __, place) => {
        const shown = place == null ? last : value;
        if (shown == null) return MISSING;
        return chart.prefixes ? prefixed(shown, chart.unit, 4) : written(shown) + chart.unit;
      },
    };
  };

  const axes = (chart) => {
    const look = {
      stroke: css("--soft"), font: "12px " + getComputedStyle(document.body).fontFamily,
      grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--rule"), width: 1, size: 4 }, gap: 4,
    };
    const label = (value) => (chart.prefixes ? prefixed(value, chart.unit, 6) : written(value, 6) + chart.unit);
    const whole = Array.from({ length: 16 }, (_, power) => [1, 2, 5].map((factor) => factor * 10 ** power)).flat();
    const byLog = { splits: (u, axis, low, high) => logTicks(low, high), filter: (_, ticks) => ticks };
    const width = (u, labels) => {
      u.ctx.font = look.font;
      return 12 + Math.ceil(Math.max(20, ...(labels ?? []).map((text) => u.ctx.measureText(text).width)));
    };
    return (logSteps) => [
      {
        ...look, grid: { show: false }, space: 70, size: 28, incrs: whole, ...(logSteps ? byLog : {}),
        values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? steps(tick) : "")),
      },
      { ...look, space: 38, size: width, ...(chart.log ? byLog : {}), values: (_, ticks) => ticks.map(label) },
    ];
  };

  // Skipped steps as crosses, other events as dotted lines over the whole height.
  const drawMarks = (marks) => (u) => {
    const { left, top, width, height } = u.bbox;
    const ratio = devicePixelRatio;
    u.ctx.save();
    u.ctx.lineWidth = 1.5 * ratio;
    for (const [step, kind] of marks) {
      const x = u.valToPos(step, "x", true);
      if (!(x >= left && x <= left + width)) continue;
      const skipped = kind === "skipped";
      const [bottom, arm] = [top + height - 7 * ratio, 4 * ratio];
      u.ctx.strokeStyle = css(skipped ? "--bad" : "--soft");
      u.ctx.setLineDash(skipped ? [] : [1.5 * ratio, 4 * ratio]);
      u.ctx.beginPath();
      for (const [fromX, fromY, toX, toY] of skipped
        ? [[x - arm, bottom - arm, x + arm, bottom + arm], [x - arm, bottom + arm, x + arm, bottom - arm]]
        : [[x, top, x, top + height]]) {
        u.ctx.moveTo(fromX, fromY);
        u.ctx.lineTo(toX, toY);
      }
      u.ctx.stroke();
    }
    u.ctx.restore();
  };
  // What happened at the mark beside the cursor, in words at the mark.
  const tellMark = (label, marks) => (u) => {
    const away = ([step]) => Math.abs(u.valToPos(step, "x") - u.cursor.left);
    const nearest = marks.toSorted((one, other) => away(one) - away(other))[0];
    const found = u.cursor.left >= 0 && nearest && away(nearest) <= 10;
    label.hidden = !found;
    if (!found) return;
    label.textContent = nearest[2];
    const most = u.over.clientWidth - label.offsetWidth;
    label.style.left = Math.max(0, Math.min(u.valToPos(nearest[0], "x") + 6, most)) + "px";
  };

  const draw = (figure, chart, logSteps) => {
    const frame = figure.querySelector(".frame");
    const label = document.createElement("p");
    label.className = "chart-event";
    label.hidden = true;
    const data = joined(chart, logSteps);
    const view = chart.views[logSteps ? 1 : 0];
    const marks = chart.marks.filter(([step]) => !logSteps || step >= 1);
    const lastStep = data[0].at(-1);
    const kind = (index) => chart.series[index - 1].kind;
    const isWhole = (u) => u.series[0].idxs[0] === 0 && u.series[0].idxs[1] === data[0].length - 1;
    frame.replaceChildren();
    return new uPlot({
      width: frame.clientWidth,
      height: chart.height + 40,
      padding: [12, 20, 0, 0],
      cursor: { y: false, drag: { x: true, y: false, dist: 5 }, sync: { key: "steps", scales: ["x", null] } },
      legend: {
        markers: {
          width: 2,
          stroke: (u, index) => (kind(index) === "dots" ? u.series[index].points.fill() : u.series[index].stroke()),
          dash: (_, index) => (kind(index) === "dashed" ? "dashed" : "solid"),
        },
      },
      scales: {
        x: {
          time: false, distr: logSteps ? 3 : 1,
          range: (_, low, high) => (low === high ? [low - 0.5, high + 0.5] : [low, high]),
        },
        y: {
          distr: chart.log ? 3 : 1,
          range: (u, low, high) => (isWhole(u) && view.range ? view.range : padded(chart, low, high)),
        },
      },
      axes: axes(chart)(logSteps),
      series: [
        { label: "step", value: (_, step, __, place) => written(place == null ? lastStep : step, 15) },
        ...chart.series.map(seriesOptions(chart, data)),
      ],
      hooks: {
        drawAxes: [drawMarks(marks)],
        draw: [(u) => {
          const words = view.beyond === 1 ? " value lies beyond the axis." : " values lie beyond the axis.";
          figure.querySelector(".beyond").textContent = view.beyond && isWhole(u) ? written(view.beyond, 15) + words : "";
        }],
        setCursor: [tellMark(label, marks)],
        init: [(u) => u.over.append(label)],
      },
    }, data, frame);
  };

  // The legend's names by keyboard as by mouse, and the cursor by arrow keys.
  const listen = (chart) => {
    for (const name of chart.root.querySelectorAll(".u-series:not(:first-child) th")) {
      name.tabIndex = 0;
      name.setAttribute("role", "button");
      name.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        name.click();
      });
    }
    chart.over.tabIndex = 0;
    chart.over.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      const [first, last] = chart.series[0].idxs;
      const place = Math.min(last, Math.max(first, (chart.cursor.idx ?? last + (move < 0 ? 1 : -1)) + move));
      chart.setCursor({ left: chart.valToPos(chart.data[0][place], "x"), top: 0 });
    });
  };

  const redraws = [...document.querySelectorAll("figure[data-chart]")].map((figure) => {
    const chart = JSON.parse(figure.dataset.chart);
    const frame = figure.querySelector(".frame");
    const box = figure.querySelector(".switch input");
    const redraw = () => {
      figure.chart?.destroy();
      figure.chart = draw(figure, chart, box?.checked ?? false);
      listen(figure.chart);
    };
    redraw();
    if (box) {
      box.closest(".switch").hidden = false;
      box.addEventListener("change", redraw);
    }
    new ResizeObserver(() => {
      const width = frame.clientWidth;
      if (width !== figure.chart.width) figure.chart.setSize({ width, height: figure.chart.height });
    }).observe(frame);
    return redraw;
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraws.forEach((redraw) => redraw()));
  for (const hint of document.querySelectorAll(".chart-hint")) hint.hidden = false;
}
