"use strict";
/* Filters, table, charts and the comparison of two chips of a ledger, from the data in the page. */
(() => {
  const data = JSON.parse(document.getElementById("ledger-data").textContent);
  const numbers = new Set(data.numbers);
  const isNumber = data.columns.map((name) => numbers.has(name));
  const rows = data.rows.map((values) => {
    const row = {};
    for (let place = 0; place < isNumber.length; place += 1) row[data.columns[place]] = isNumber[place] ? values[place] : data.shared[values[place]];
    return row;
  });
  const at = (id) => document.getElementById(id);
  const element = (tag, text, attributes = {}) => Object.assign(document.createElement(tag), { textContent: text ?? "" }, attributes);
  const cell = (text, head, className = "") => {
    const found = element("td", text, { className });
    if (head) found.dataset.head = head;
    return found;
  };
  const digits = (value) => value === null || value === undefined ? "–"
    : new Intl.NumberFormat("en", { maximumSignificantDigits: 4 }).format(value);
  const signed = (ratio) => `${ratio > 0 ? "+" : "−"}${Math.abs(100 * ratio).toFixed(Math.abs(ratio) < 0.1 ? 1 : 0)} %`;
  const unique = (values) => [...new Set(values)].sort((a, b) => String(a).localeCompare(String(b)));
  const select = (form, label, values, chosen, changed, any = "") => {
    const field = element("select");
    if (any) field.append(element("option", any, { value: "" }));
    for (const value of values) field.append(element("option", value, { value, selected: value === chosen }));
    field.addEventListener("change", () => changed(field.value));
    const wrapped = element("label", label);
    wrapped.append(field);
    form.append(wrapped);
    return field;
  };

  const STEP = 50;
  const filters = { case: "", vendor: "", chip: "", precision: "", verdict: "", evidence: "" };
  let shown = [], limit = STEP;
  const costs = rows.some((row) => row.costs.length);
  for (const head of document.querySelectorAll("th.cost")) head.hidden = !costs;
  for (const name of Object.keys(filters)) {
    select(at("filters"), name[0].toUpperCase() + name.slice(1), unique(rows.map((row) => row[name])), "",
      (value) => { filters[name] = value; limit = STEP; update(); }, "all");
  }
  const MARKS = { VALID: "✓", OPEN: "○", INVALID: "✕" };
  const verdict = (row) => {
    const found = element("span", `${MARKS[row.verdict]} ${row.verdict}`, { className: `verdict ${row.verdict.toLowerCase()}` });
    return found;
  };
  const lineOf = (row) => {
    const line = element("tr");
    const name = element("th", "", { scope: "row" });
    const details = element("details");
    const summary = element("summary", row.case);
    details.append(summary);
    details.addEventListener("toggle", () => { if (details.open && details.childElementCount === 1) details.append(factsOf(row)); });
    const facts = [row.task, row.precision, row.variant].filter(Boolean).join(" · ");
    name.append(details, element("small", row.withdrawn ? `${facts} · withdrawn` : facts));
    const scale = `${row.nnodes} × ${row.nproc}`;
    const judged = cell("", "Verdict");
    judged.append(verdict(row));
    if (row.marks) judged.append(element("br"), element("small", row.marks));
    const half = row.low === null ? "" : ` ± ${digits((row.high - row.low) / 2)}`;
    line.append(name, cell(row.chip, "Chip"), cell(scale, "Scale", "n"), judged, cell(`${digits(row.rate)}${half} ${row.unit}`, "Rate", "n"),
      cell(row.target === null ? "–" : `${digits(row.target)} s`, "To target", "n"), cell(row.joules === null ? "–" : `${digits(row.joules)} J`, "Energy per unit", "n"));
    if (costs) line.append(cell(row.costs.length ? `${digits(row.costs[0][1])} ${data.currency}` : "–", row.costs.length ? row.costs[0][0] : "Cost", "n"));
    line.append(cell(String(row.parties), "Signers that agree", "n"), cell(row.evidence + (row.signed ? `, signed by ${row.signed}` : ""), "Evidence"));
    return line;
  };
  const factsOf = (row) => {
    const list = element("dl", "", { className: "pairs" });
    const facts = [["Record", row.id], ["Run", `${row.run}, ${row.date}, AccelMark ${row.version}, rounds: ${row.rounds}`], ["Device", `${row.device} (${row.vendor})`],
      ["Added by", row.by], ["Where", row.where], ["Withdrawn", row.withdrawn], ["Note", row.note], ["Why not VALID", row.reasons.join("; ")],
      ["Changed by the vendor", row.changed.join("; ") || "nothing"], ...row.costs.map(([title, value]) => [title, `${digits(value)} ${data.currency}`]),
      ["Work", row.work.map((pair) => pair.join(": ")).join("; ")], ["Environment", row.environment.map((pair) => pair.join(": ")).join("; ")]];
    for (const [name, text] of facts) if (text) list.append(element("dt", name), element("dd", text));
    return list;
  };
  const table = () => {
    at("table").tBodies[0].replaceChildren(...shown.slice(0, limit).map(lineOf));
    at("count").textContent = `${shown.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} results, newest first.`;
    at("more").hidden = shown.length <= limit;
  };
  at("more").addEventListener("click", () => { limit += 4 * STEP; table(); });

  const chart = (id, traces, layout) => { at(id).querySelector("script").textContent = JSON.stringify({ traces, layout }); };
  const nothing = (text) => ({ xaxis: { visible: false }, yaxis: { visible: false }, annotations: [{ text, showarrow: false }] });
  const redraw = () => document.dispatchEvent(new Event("charts"));
  const grouped = (found, name) => Map.groupBy ? Map.groupBy(found, name) : found.reduce((all, row) => {
    const part = all.get(name(row));
    if (part) part.push(row); else all.set(name(row), [row]);
    return all;
  }, new Map());
  const largest = (groups) => [...groups].sort((a, b) => b[1].length - a[1].length);
  const newest = (found, name) => [...new Map(found.toReversed().map((row) => [name(row), row])).values()];
  const devices = (row) => row.nnodes * row.nproc;
  const works = new Map();  // equal work is one array
  const workOf = (row) => {
    if (!works.has(row.work)) works.set(row.work, { number: works.size, values: Object.fromEntries(row.work) });
    return works.get(row.work);
  };
  const series = (row) => `${row.chip}, ${row.precision}, ${workOf(row).values.data} data`;
  const line = (name, number, extra) => ({ type: "scatter", name, line: { color: `--r${number % 6 + 1}`, width: 1.8 }, marker: { color: `--r${number % 6 + 1}`, size: 8 },
    hovertemplate: "%{text}<extra></extra>", ...extra });
  const label = (row) => `${row.case}, ${series(row)}, ${row.nnodes} × ${row.nproc}: ${digits(row.rate)} ${row.unit}, ${row.date.slice(0, 10)}`.replace(/[<>&]/g, " ");
  let chartCase = "", historyKey = "";
  const charts = () => {
    const measured = shown.filter((row) => row.rate !== null && !row.withdrawn);
    const cases = largest(grouped(measured, (row) => `${row.case}, ${row.task}`));
    if (!cases.some(([name]) => name === chartCase)) chartCase = cases.length ? cases[0][0] : "";
    at("chosen").replaceChildren();
    select(at("chosen"), "Case", cases.map(([name]) => name), chartCase, (value) => { chartCase = value; charts(); redraw(); });
    const found = measured.filter((row) => `${row.case}, ${row.task}` === chartCase);
    const scaling = largest(grouped(newest(found, (row) => `${series(row)} ${devices(row)}`), series))
      .map(([name, part]) => [name, part.toSorted((a, b) => devices(a) - devices(b))]).filter(([, part]) => part.length > 1).slice(0, 6);
    chart("scaling", scaling.map(([name, part], number) => line(name, number, { mode: "lines+markers", x: part.map(devices), text: part.map(label),
      y: part.map((row) => (row.rate / devices(row)) / (part[0].rate / devices(part[0]))) })),
    { xaxis: { title: { text: "devices" }, type: "log", dtick: Math.log10(2) }, yaxis: { tickformat: ".0%", rangemode: "tozero" },
      ...(scaling.length ? {} : nothing("No chip has results at two scales.")) });
    const points = newest(found, (row) => `${series(row)} ${row.nnodes} ${row.nproc}`).filter((row) => row.joules);
    const groups = largest(grouped(points, (row) => row.chip)).slice(0, 6);
    const x = (row) => row.rate / devices(row), y = (row) => 1 / row.joules;
    const front = points.filter((row) => !points.some((other) => x(other) >= x(row) && y(other) >= y(row) && other !== row)).toSorted((a, b) => x(a) - x(b));
    chart("pareto", [...groups.map(([name, part], number) => line(name, number, { mode: "markers", x: part.map(x), y: part.map(y), text: part.map(label) })),
      ...(front.length > 1 ? [line("Pareto front", 5, { mode: "lines", x: front.map(x), y: front.map(y), text: front.map(label), line: { color: "--soft", dash: "dot" } })] : [])],
    { xaxis: { title: { text: `${found.length ? found[0].unit : ""} per device` }, rangemode: "tozero" }, yaxis: { title: { text: "units per joule" }, rangemode: "tozero" },
      ...(points.length ? {} : nothing("No result has energy.")) });
    const keys = largest(grouped(found, (row) => `${series(row)}, ${row.nnodes} × ${row.nproc}`));
    if (!keys.some(([name]) => name === historyKey)) historyKey = keys.length ? keys[0][0] : "";
    at("keys").replaceChildren();
    select(at("keys"), "Key", keys.slice(0, 200).map(([name]) => name), historyKey, (value) => { historyKey = value; charts(); redraw(); });
    const history = (keys.find(([name]) => name === historyKey)?.[1] ?? []).toSorted((a, b) => a.date.localeCompare(b.date));
    chart("history", history.length < 2 ? [] : [...grouped(history, (row) => row.version)].map(([version, part], number) => line(`AccelMark ${version}`, number, {
      mode: "markers", x: part.map((row) => row.date), y: part.map((row) => row.rate), text: part.map(label),
      error_y: { type: "data", symmetric: false, thickness: 1, width: 0, color: `--r${number % 6 + 1}`, array: part.map((row) => row.high === null ? 0 : row.high - row.rate),
        arrayminus: part.map((row) => row.low === null ? 0 : row.rate - row.low) } })),
    { xaxis: { type: "date" }, yaxis: { title: { text: history.length ? history[0].unit : "" }, rangemode: "tozero" },
      ...(history.length > 1 ? {} : nothing("This key has one result.")) });
  };

  const differing = (one, two) => {
    const second = workOf(two).values;
    const found = one.work.filter(([name, value]) => second[name] !== value).map(([name, value]) => `${name}: ${value} and ${second[name] ?? "none"}`);
    if (one.unit !== two.unit) found.push(`unit: ${one.unit} and ${two.unit}`);
    return found;
  };
  const sides = { first: "", second: "" };
  const interval = (one, two) => one.low === null || two.low === null ? "" : ` (${signed(two.low / one.high - 1)} to ${signed(two.high / one.low - 1)})`;
  const compare = () => {
    const measured = shown.filter((row) => row.rate !== null && !row.withdrawn);
    const chips = largest(grouped(measured, (row) => row.chip)).map(([name]) => name);
    for (const [place, side] of ["first", "second"].entries()) if (!chips.includes(sides[side])) sides[side] = chips[Math.min(place, chips.length - 1)] ?? "";
    at("sides").replaceChildren();
    for (const side of ["first", "second"]) select(at("sides"), side[0].toUpperCase() + side.slice(1), unique(chips), sides[side], (value) => { sides[side] = value; compare(); });
    const of = (chip) => grouped(measured.filter((row) => row.chip === chip), (row) => `${row.case}, ${row.task}`);
    const [ours, theirs] = [of(sides.first), of(sides.second)];
    const lines = [], faster = [], cheaper = [];
    for (const [name, part] of sides.first === sides.second ? [] : ours) {
      let best = null;
      const kind = (row) => `${workOf(row).number} ${row.precision}`;
      for (const one of newest(part, kind)) for (const two of newest(theirs.get(name) ?? [], kind)) {
        const why = differing(one, two), distance = why.length + (one.precision !== two.precision ? 0.5 : 0);
        if (best === null || distance < best.distance) best = { one, two, why, distance };
      }
      if (best === null) continue;
      const { one, two, why } = best, change = two.rate / one.rate - 1;
      const [before, after] = [one, two].map((row) => row.costs.length ? row.costs[0][1] : null);
      if (!why.length) { faster.push(change); if (before && after) cheaper.push(1 - after / before); }
      const text = [...why, ...(one.precision !== two.precision ? [`precision: ${one.precision} and ${two.precision}`] : []),
        ...[one, two].filter((row) => row.verdict === "INVALID" || row.evidence !== "bundle").map((row) => `${row.chip}: ${row.verdict}, ${row.evidence}`),
        ...[one, two].filter((row) => row.changed.length).map((row) => `${row.chip} changed: ${row.changed.join("; ")}`)].join(" · ");
      const entry = element("tr");
      entry.append(element("th", name, { scope: "row" }), cell(`${digits(one.rate)} ${one.unit}`, sides.first, "n"), cell(`${digits(two.rate)} ${two.unit}`, sides.second, "n"),
        cell(why.length ? "–" : `${signed(change)}${interval(one, two)}`, "Difference", "n strong"),
        cell(one.joules && two.joules && !why.length ? signed(two.joules / one.joules - 1) : "–", "Energy per unit", "n"));
      if (costs) entry.append(cell(before && after && !why.length ? signed(after / before - 1) : "–", "Cost", "n"));
      entry.append(cell((why.length ? "Not comparable: " : "") + text, "", "break"));
      lines.push(entry);
    }
    at("pairs").tBodies[0].replaceChildren(...lines);
    const range = (values) => values.length > 1 ? `${signed(Math.min(...values))} to ${signed(Math.max(...values))}` : signed(values[0]);
    at("summary").textContent = !lines.length ? "Choose two chips that have a case in common."
      : `${sides.second} against ${sides.first}: ${faster.length} of ${lines.length} cases are comparable.`
        + (faster.length ? ` Speed ${range(faster)}.` : "") + (cheaper.length ? ` Cheaper by ${range(cheaper)}.` : "");
  };
  const update = () => {
    shown = rows.filter((row) => Object.entries(filters).every(([name, value]) => !value || row[name] === value));
    table();
    document.documentElement.dataset.ledger = String(shown.length);
    setTimeout(() => { compare(); charts(); redraw(); });
  };
  update();
})();
