"use strict";
(() => {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const root = document.documentElement;
  const GAP = 34, COLOURS = 6, PRINT_WIDTH = 680;
  const drawn = [];

  const colours = () => {
    const style = getComputedStyle(root);
    const of = (name) => style.getPropertyValue(name).trim();
    return { ink: of("--ink"), soft: of("--soft"), paper: of("--paper"), grid: of("--grid"), accent: of("--accent"),
      rounds: Array.from({ length: COLOURS }, (_, i) => of(`--r${i + 1}`)) };
  };
  const few = (values) => values.filter((value) => value !== null).length < 3; // a line of one point would not be seen
  const lineColour = (c, i) => c.rounds[i % COLOURS];
  const base = (c) => ({
    paper_bgcolor: c.paper, plot_bgcolor: c.paper, showlegend: false, hovermode: "x unified",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: c.soft },
    hoverlabel: { bgcolor: c.paper, bordercolor: c.grid, font: { color: c.ink } },
  });
  const axis = (c) => ({ gridcolor: c.grid, linecolor: c.grid, zerolinecolor: c.grid, tickfont: { color: c.soft },
    automargin: false, fixedrange: false });

  function strips(data, kind, c, strip, narrow) {
    const STRIP = strip, panels = data[kind], count = panels.length;
    const height = count * STRIP + (count - 1) * GAP;
    const layout = Object.assign(base(c), { height: height + 74, margin: { l: 62, r: 8, t: 26, b: 48 }, annotations: [], shapes: [] });
    const traces = [];
    let labelsBefore = "";
    panels.forEach((panel, p) => {
      const suffix = p ? String(p + 1) : "";
      const top = 1 - (p * (STRIP + GAP)) / height;
      const bottom = p === count - 1 ? 0 : top - STRIP / height;
      layout[`yaxis${suffix}`] = Object.assign(axis(c), { domain: [Math.max(bottom, 0), top], nticks: 5, separatethousands: true,
        rangemode: panel.from_zero ? "tozero" : "normal", anchor: "x", fixedrange: true });
      layout.annotations.push({ text: `<b>${escape(panel.title)}</b>${panel.unit ? "  " + escape(panel.unit) : ""}`, xref: "paper", yref: "paper",
        x: 0, y: top, xanchor: "left", yanchor: "bottom", yshift: 4, showarrow: false, font: { color: c.ink, size: 12.5 } });
      if (panel.level !== null) {
        layout.shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, yref: `y${suffix}`, y0: panel.level, y1: panel.level,
          line: { color: c.soft, width: 1, dash: "dot" } });
        layout.annotations.push({ text: `target ${panel.level}`, xref: "paper", x: 0, xanchor: "left", yref: `y${suffix}`, y: panel.level,
          yanchor: "bottom", showarrow: false, font: { color: c.soft, size: 11 } });
      }
      const many = panel.lines.length > 1;
      const labels = panel.lines.map((line) => line.label).join("\n");
      panel.lines.forEach((line, i) => traces.push({
        type: "scatter", mode: panel.markers || few(line.y) ? "lines+markers" : "lines", x: line.x, y: line.y, xaxis: "x", yaxis: `y${suffix}`,
        name: escape(line.label), text: line.text.length ? line.text : undefined, connectgaps: false,
        line: { color: lineColour(c, i), width: many ? 1.2 : 1.5 }, marker: { color: lineColour(c, i), size: 6 },
        hovertemplate: (line.text.length ? "%{y:,.5~g}  (%{text})" : "%{y:,.5~g}"),
      }));
      if (many && labels !== labelsBefore) legend(layout, panel.lines, c, top, narrow ? -14 : 4);
      labelsBefore = labels;
    });
    layout.xaxis = Object.assign(axis(c), { anchor: count > 1 ? `y${count}` : "y", title: { text: `${data.time}, s`, font: { color: c.soft, size: 12 } },
      separatethousands: true, hoverformat: ",.4~g", range: span(data) });
    return { traces, layout };
  }

  function span(data) {
    let least = 0, most = 1e-3;
    for (const panel of [...data.progress, ...data.telemetry]) for (const line of panel.lines) if (line.x.length) {
      least = Math.min(least, line.x[0]);
      most = Math.max(most, line.x[line.x.length - 1]);
    }
    return [least, most + 0.01 * (most - least)];
  }

  function legend(layout, lines, c, top, shift) {
    const text = lines.map((line, i) => `<span style="color:${lineColour(c, i)}">●</span> ${escape(line.label)}`).join("   ");
    layout.annotations.push({ text: text, xref: "paper", yref: "paper", x: 1, y: top, xanchor: "right", yanchor: "bottom", yshift: shift,
      showarrow: false, font: { color: c.soft, size: 11 } });
  }

  function bars(data, c) {
    const single = data.bars.length === 1;
    const layout = Object.assign(base(c), { height: 300, margin: { l: 62, r: 8, t: 30, b: 48 }, barmode: "overlay", annotations: [], shapes: [], hovermode: single ? "closest" : "x unified" });
    const traces = data.bars.map((entry, i) => {
      const low = entry.edges.slice(0, -1), high = entry.edges.slice(1);
      const total = entry.counts.reduce((sum, n) => sum + n, 0) || 1;
      const widths = low.map((edge, b) => Math.max(high[b] - edge, 1e-9));
      const last = low.length - 1;
      const shown = last > 0 ? widths.map((w, b) => b === last ? Math.min(w, widths[0]) : w) : widths;
      if (!single) return { type: "scatter", mode: "lines", name: escape(entry.label), x: [...low, low[last] + shown[last]],
        y: [...entry.counts, entry.counts[last]].map((n) => 100 * n / total), line: { shape: "hv", color: lineColour(c, i), width: 1.5 },
        hovertemplate: "from %{x:.5~g} ms: %{y:.3~g} %" };
      return { type: "bar", name: escape(entry.label), x: low.map((edge, b) => edge + shown[b] / 2), y: entry.counts.map((n) => 100 * n / total),
        width: shown, opacity: 0.9, marker: { color: lineColour(c, i), line: { width: 0 } },
        text: low.map((edge, b) => `${edge.toPrecision(5)} to ${high[b].toPrecision(5)} ms: ${entry.counts[b].toLocaleString("en")} steps`), textposition: "none",
        hovertemplate: "%{text} (%{y:.3~g} %)<extra>%{fullData.name}</extra>" };
    });
    const first = data.bars[0];
    const span = first.edges[first.edges.length - 2] - first.edges[0];
    let before = -Infinity, level = 0;
    for (const [name, value] of single ? first.marks : []) {
      if (value > first.edges[first.edges.length - 1]) continue;
      level = value - before < 0.09 * span ? level + 1 : 0;
      before = value;
      layout.shapes.push({ type: "line", x0: value, x1: value, yref: "paper", y0: 0, y1: 1, line: { color: c.soft, width: 1, dash: "dot" } });
      layout.annotations.push({ text: name, x: value, yref: "paper", y: 1, yanchor: "bottom", yshift: -14 * level, xanchor: "left", xshift: level ? 3 : -8, showarrow: false, font: { size: 11, color: c.soft } });
    }
    layout.xaxis = Object.assign(axis(c), { title: { text: "step time, ms", font: { size: 12, color: c.soft } }, separatethousands: true });
    layout.yaxis = Object.assign(axis(c), { title: { text: "share of steps, %", font: { size: 12, color: c.soft } }, rangemode: "tozero", fixedrange: true });
    if (!single) legend(layout, data.bars, c, 1, 4);
    return { traces, layout };
  }

  function escape(text) {
    return String(text).replace(/[&<>"]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[sign]);
  }

  function draw(width) {
    if (!window.Plotly) return;
    const c = colours();
    for (const element of document.querySelectorAll(".plot[data-case]")) {
      const data = plots[element.dataset.case];
      const kind = element.dataset.kind;
      const { traces, layout } = kind === "bars" ? bars(data, c) : strips(data, kind, c, width ? 84 : 124, (width || element.clientWidth) < 480);
      if (width) { layout.width = width; layout.autosize = false; } else { layout.autosize = true; }
      Plotly.react(element, traces, layout, { responsive: true, displaylogo: false, displayModeBar: false, scrollZoom: false });
      if (drawn.includes(element)) continue;
      drawn.push(element);
      if (kind !== "bars") element.on("plotly_relayout", (change) => follow(element, change));
    }
    root.dataset.drawn = String(drawn.length);
  }

  function follow(source, change) {
    const zoomed = change["xaxis.range[0]"] !== undefined, reset = change["xaxis.autorange"];
    if (!zoomed && !reset) return;
    const range = zoomed ? [change["xaxis.range[0]"], change["xaxis.range[1]"]] : span(plots[source.dataset.case]);
    for (const element of drawn) {
      if (element.dataset.case !== source.dataset.case || element.dataset.kind === "bars") continue;
      const now = element.layout.xaxis.range;
      if (reset || now[0] !== range[0] || now[1] !== range[1]) Plotly.relayout(element, { "xaxis.range": range.slice() });
    }
  }

  draw();
  document.addEventListener("charts", () => draw());
  addEventListener("beforeprint", () => draw(PRINT_WIDTH));
  new MutationObserver(() => draw()).observe(root, { attributes: true, attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
})();
