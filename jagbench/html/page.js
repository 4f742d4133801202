"use strict";
(() => {
  const read = (id) => document.getElementById(id).textContent;
  const report = JSON.parse(read("report-data"));
  const fields = report.view;
  const selects = [...document.querySelectorAll("select[data-field]")];
  let view = report.views[0];

  const tables = Object.fromEntries(Object.entries(report.tables).map(([name, table]) => [
    name,
    table.rows.map((row) => Object.fromEntries(table.fields.map((field, i) => [field, row[i]]))),
  ]));

  /** The script kept compressed in the page, run as if it stood there. */
  async function unpack(id) {
    const bytes = Uint8Array.from(atob(read(id)), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  /** Rows of the view; a field that a row leaves open (null) passes. */
  function chosen(name, open) {
    return tables[name].filter((row) => fields.every((field, i) =>
      open.includes(field) || row[field] == null || row[field] === view[i]));
  }

  /** Only panels with more than one device, where there are any. */
  function generations(rows, note) {
    const devices = new Map();
    for (const row of rows) {
      if (row.rate == null) continue;
      devices.set(row.panel, (devices.get(row.panel) ?? new Set()).add(row.hardware));
    }
    const many = [...devices].filter(([, names]) => names.size > 1).map(([panel]) => panel);
    const left = devices.size - many.length;
    note.textContent = many.length && left
      ? `${left} cases known on one device only are left out here; the table has them.` : "";
    return many.length ? rows.filter((row) => many.includes(row.panel)) : rows;
  }

  /** Cells as wide as lets every implementation be seen, within what can be read. */
  function fitCells(spec, rows, room) {
    const columns = new Set(rows.map((row) => row.implementation)).size;
    const lengths = new Set(rows.map((row) => row.length)).size;
    const margin = Math.min(260, Math.max(...rows.map((row) => row.grid.length)) * 6.6) + 50;
    const step = Math.floor(((room - margin) / columns - 14) / lengths);
    spec.spec.width = { step: Math.max(42, Math.min(64, step), Math.ceil(105 / lengths)) };
  }

  /** Panel width and columns for the room there is. */
  function fit(chart, spec, rows, room) {
    if (chart.id === "heat") {
      fitCells(spec, rows, room);
    } else if (!chart.panel) {
      if (spec.width) spec.width = Math.max(220, Math.min(900, room - 460));
    }
    if (!chart.panel) return;
    const panels = Math.max(1, new Set(rows.map((row) => row[chart.panel])).size);
    if (chart.fixed) {
      spec.columns = Math.max(1, Math.floor(room / chart.fixed));
      return;
    }
    const longest = Math.max(0, ...rows.map((row) => row.case.length));
    const margin = chart.labels ? Math.min(280, longest * 6.6) + 30 : 60;
    const fitting = Math.max(1, Math.floor((room - margin) / (chart.labels ? 250 : 380)));
    spec.columns = Math.min(chart.columns, panels, fitting);
    spec.spec.width = Math.max(220, Math.floor((room - margin) / spec.columns) - 45);
    if (spec.spec.width < 380) {
      spec.spec.layer = spec.spec.layer.filter((layer) => layer.name !== "ink_label");
    }
  }

  /** Legends of what is there alone, and legends and labels that leave room on a small screen. */
  function trim(node, names, room) {
    if (node === null || typeof node !== "object") return;
    const { scale, legend, axis } = node;
    if (node.field === "implementation" && scale?.range) {
      const kept = scale.domain.map((name) => names.has(name));
      scale.domain = scale.domain.filter((_, i) => kept[i]);
      scale.range = scale.range.filter((_, i) => kept[i]);
      if (legend) legend.columns = Math.max(1, Math.floor(room / 190));
    }
    if (axis?.labelLimit) axis.labelLimit = Math.min(axis.labelLimit, Math.floor(room * 0.4));
    for (const child of Object.values(node)) trim(child, names, room);
  }

  async function draw(chart) {
    const figure = document.getElementById(chart.id);
    const place = figure.querySelector(".chart");
    const note = figure.querySelector(".note");
    const datasets = {};
    for (const name of chart.tables) datasets[name] = chosen(name, chart.open);
    const main = chart.tables[0];
    note.textContent = "";
    if (chart.id === "generations") datasets[main] = generations(datasets[main], note);
    if (chart.needs) datasets[main] = datasets[main].filter((row) => row[chart.needs] != null);
    place.replaceChildren();
    if (!datasets[main].length) {
      note.textContent = "Nothing recorded for this choice.";
      return;
    }
    const spec = structuredClone(chart.spec);
    fit(chart, spec, datasets[main], figure.clientWidth);
    trim(spec, new Set(datasets[main].map((row) => row.implementation)), figure.clientWidth);
    spec.datasets = datasets;
    await vegaEmbed(place, spec, {
      mode: "vega-lite", renderer: "svg", config: report.config,
      // 1: errors alone; a layer without a mark in one panel is no reason to warn.
      logLevel: 1,
      actions: { export: true, source: false, compiled: false, editor: false },
    });
  }

  async function drawAll() {
    for (const chart of report.charts) {
      try {
        await draw(chart);
      } catch (error) {
        console.error(error);
        document.querySelector(`#${chart.id} .note`).textContent = `Not drawn: ${error}`;
      }
    }
    document.body.dataset.charts = "drawn";
  }

  /** Takes the change over, and the rest of the nearest view that was measured. */
  function change(select) {
    const place = fields.indexOf(select.dataset.field);
    const wanted = fields.map((_, i) => (i === place ? select.value : view[i]));
    const near = (other) => other.filter((value, i) => value === wanted[i]).length;
    const fitting = report.views.filter((other) => other[place] === select.value);
    view = fitting.reduce((best, other) => (near(other) > near(best) ? other : best));
    show();
    drawAll();
  }

  function show() {
    for (const select of selects) select.value = view[fields.indexOf(select.dataset.field)];
  }

  async function start() {
    try {
      await unpack("vega-bundle");
    } catch (error) {
      console.error(error);
      for (const note of document.querySelectorAll("figure .note")) {
        note.textContent = `No charts (${error}); the tables below hold every number.`;
      }
      return;
    }
    if (view) {
      document.querySelector("nav").hidden = selects.length === 0;
      for (const select of selects) select.addEventListener("change", () => change(select));
      show();
    }
    await drawAll();
    let width = document.body.clientWidth;
    let timer = 0;
    addEventListener("resize", () => {
      clearTimeout(timer);
      timer = setTimeout(() => {
        if (document.body.clientWidth === width) return;
        width = document.body.clientWidth;
        drawAll();
      }, 300);
    });
  }
  start();
})();
