"use strict";
/* Draws the charts that a page holds as JSON, in the colours of its theme. */
(() => {
  const root = document.documentElement;
  const themed = (value, css) => {
    if (typeof value === "string") return value.startsWith("--") ? css.getPropertyValue(value).trim() : value;
    if (Array.isArray(value)) return value.map((item) => themed(item, css));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, themed(item, css)]));
  };
  const axis = { gridcolor: "--grid", linecolor: "--grid", zerolinecolor: "--grid", automargin: true, separatethousands: true,
    ticklabelstandoff: 4, tickangle: 0 };
  const draw = (width) => {
    if (!window.Plotly) return;
    const css = getComputedStyle(root);
    for (const figure of document.querySelectorAll(".chart")) {
      const { traces, layout } = JSON.parse(figure.querySelector("script").textContent);
      const several = traces.filter((trace) => trace.showlegend !== false).length > 1;
      const whole = Object.assign({
        height: 320, margin: { l: 62, r: 16, t: 16, b: 48 }, showlegend: several, barmode: "overlay", hovermode: "closest",
        legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" }, paper_bgcolor: "--paper", plot_bgcolor: "--paper",
        font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: "--soft" },
        hoverlabel: { bgcolor: "--paper", bordercolor: "--grid", font: { color: "--ink" } },
      }, layout, { xaxis: Object.assign({}, axis, layout.xaxis), yaxis: Object.assign({}, axis, layout.yaxis) });
      if (width) whole.width = width;
      Plotly.react(figure.querySelector(".plot"), themed(traces, css), themed(whole, css),
        { responsive: true, displaylogo: false, displayModeBar: false, scrollZoom: false });
    }
    root.dataset.charts = String(document.querySelectorAll(".chart .plot .main-svg").length > 0);
  };
  addEventListener("load", () => requestIdleCallback(async () => {  // the page is shown first
    const packed = document.getElementById("plotly");
    if (!packed) return;
    const bytes = Uint8Array.from(atob(packed.textContent), (sign) => sign.charCodeAt(0));
    const script = document.createElement("script");
    script.textContent = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    packed.replaceWith(script);
    document.dispatchEvent(new Event("charts"));
  }));
  draw();
  document.addEventListener("charts", () => draw());
  addEventListener("beforeprint", () => draw(680));
  new MutationObserver(() => draw()).observe(root, { attributes: true, attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
})();
