"use strict";
(() => {
  const { unit, plots } = JSON.parse(document.getElementById("data").textContent);
  const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const draw = () => {
    for (const [name, plot] of Object.entries(plots)) {
      const element = document.querySelector(`[data-plot="${name}"]`);
      if (!element) continue;
      const traces = [{ x: plot.x, y: plot.y, name: plot.unit, mode: "lines+markers", line: { color: ink("--r1") } }];
      if (plot.other) traces.push({ x: plot.x, y: plot.other, name: plot.other_name, mode: "lines+markers", line: { color: ink("--r2"), dash: "dot" } });
      Plotly.react(element, traces, {
        margin: { l: 70, r: 16, t: 8, b: 40 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { color: ink("--ink"), family: "system-ui, sans-serif", size: 12 }, showlegend: traces.length > 1,
        legend: { orientation: "h", y: 1.12 },
        xaxis: { title: { text: `time, ${unit}` }, gridcolor: ink("--grid"), rangemode: "tozero", ticklabelstandoff: 4 },
        yaxis: { title: { text: plot.unit }, gridcolor: ink("--grid"), rangemode: "tozero", ticklabelstandoff: 4, exponentformat: "SI" },
      }, { responsive: true, displaylogo: false, displayModeBar: false });
    }
  };
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  document.getElementById("theme").addEventListener("click", draw);
  const open = () => {
    const target = document.getElementById(location.hash.slice(1));
    if (target instanceof HTMLDetailsElement) target.open = true;
  };
  addEventListener("hashchange", open);
  open();
})();
