"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const canvases = [...document.querySelectorAll("[data-plot]")];
  const all = (name) => [...document.querySelectorAll(`[name=${name}]`)];
  const chosen = () => ({
    runs: new Set(all("run").length ? all("run").filter((b) => b.checked).map((b) => +b.value) : [0]),
    way: all("way").find((b) => b.checked).value,
    layer: all("layer")[0].value,
  });

  // ---- filters: what carries a key is shown if the key is chosen
  const matches = (keys, c) =>
    (keys.run === undefined || c.runs.has(+keys.run)) &&
    (keys.way === undefined || keys.way === c.way) &&
    (keys.layer === undefined || keys.layer === c.layer);
  const holds = (element, c) =>
    (element.dataset.run === undefined || c.runs.has(+element.dataset.run)) &&
    (element.dataset.way === undefined || c.way === "both" || element.dataset.way === c.way);
  const words = (text, c) =>
    text.replace("{way}", data.ways[c.way]).replace("{layer}", data.layers[c.layer] || "none measured");

  // ---- themes
  const media = matchMedia("(prefers-color-scheme: dark)");
  let printing = false;
  const dark = () => !printing && (root.dataset.theme === "dark" || (root.dataset.theme === "auto" && media.matches));
  const template = () => {
    const ink = dark() ? "#e6e9ee" : "#1b2230";
    const grid = dark() ? "#363d48" : "#d5dae2";
    const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: grid, automargin: true, title: { standoff: 8 } };
    const card = dark() ? "#1c2128" : "#ffffff";
    return { layout: {
      font: { color: ink, size: 12, family: "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif" },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", xaxis: axis, yaxis: axis,
      modebar: { bgcolor: "rgba(0,0,0,0)", color: grid, activecolor: ink },
      hoverlabel: { bgcolor: card, bordercolor: grid, font: { color: ink } },
    } };
  };

  // ---- drawing: a plot is drawn when it comes near the screen, and again when a choice changes it
  const config = { responsive: true, displaylogo: false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
  const PAPER = 640; // px, what fits between the margins of A4 and US letter
  const drawn = new Set();
  const draw = (canvas) => {
    const c = chosen();
    const { figure } = data.plots[canvas.dataset.plot];
    const layout = { ...figure.layout, template: template(), autosize: true };
    for (const name of ["xaxis", "yaxis"]) {
      const title = layout[name] && layout[name].title && layout[name].title.text;
      if (title) layout[name] = { ...layout[name], title: { text: words(title, c) } };
    }
    const traces = figure.data.map((trace) => ({ ...trace, visible: matches(trace.meta || {}, c) }));
    // beforeprint comes before the page is laid out for paper
    if (printing) Object.assign(layout, { autosize: false, width: PAPER });
    if (canvas.clientWidth < 480) layout.margin = { ...layout.margin, l: 48, r: 8 };
    drawn.add(canvas);
    return Plotly.react(canvas, traces, layout, config);
  };
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries)
      if (entry.isIntersecting && !drawn.has(entry.target)) draw(entry.target);
  }, { rootMargin: "600px" });

  const apply = () => {
    const c = chosen();
    for (const element of document.querySelectorAll("[data-run], [data-way]")) element.hidden = !holds(element, c);
    for (const canvas of drawn) if (canvas.offsetParent !== null) draw(canvas); else drawn.delete(canvas);
    for (const canvas of canvases) { near.unobserve(canvas); near.observe(canvas); }
    const lacking = data.absent.filter((a) => matches(a, c));
    const box = document.getElementById("absent");
    box.hidden = !lacking.length;
    box.textContent = lacking.map((a) =>
      `${data.runs[a.run]}: ${data.layers[a.layer]} is absent (${data.ways[a.way]}): ${a.reason}.`).join(" ");
  };
  const repaint = () => { for (const canvas of drawn) draw(canvas); };

  // ---- downloads
  const save = (name, type, text) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    const text = String(value);
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const csv = ({ columns, rows }) => [columns, ...rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";

  document.addEventListener("click", (event) => {
    const key = event.target.dataset && event.target.dataset.csv;
    if (key) save(`${key}.csv`, "text/csv", csv(data.plots[key]));
  });
  document.getElementById("all").addEventListener("click", () => {
    const tables = Object.entries(data.plots).map(([key, p]) => [key, { columns: p.columns, rows: p.rows }]);
    save("report.json", "application/json", JSON.stringify({ runs: data.runs, ...Object.fromEntries(tables) }));
  });
  const themes = ["auto", "light", "dark"];
  document.getElementById("theme").addEventListener("click", (event) => {
    root.dataset.theme = themes[(themes.indexOf(root.dataset.theme) + 1) % 3];
    event.target.textContent = `Theme: ${root.dataset.theme}`;
    repaint();
  });
  media.addEventListener("change", repaint);
  document.querySelector("nav").addEventListener("change", apply);
  addEventListener("beforeprint", () => {
    printing = true;
    for (const canvas of canvases) if (canvas.offsetParent !== null) draw(canvas);
  });
  addEventListener("afterprint", () => { printing = false; repaint(); });
  apply();
  root.dataset.ready = "true";
})();
