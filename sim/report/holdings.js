"use strict";
(() => {
  const plots = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const media = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => root.dataset.theme === "dark" || (root.dataset.theme === "auto" && media.matches);
  const template = () => {
    const ink = dark() ? "#e6e9ee" : "#1b2230";
    const grid = dark() ? "#363d48" : "#d5dae2";
    const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: grid, automargin: true, title: { standoff: 8 } };
    return { layout: {
      font: { color: ink, size: 12, family: "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif" },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", xaxis: axis, yaxis: axis,
      modebar: { bgcolor: "rgba(0,0,0,0)", color: grid, activecolor: ink },
      hoverlabel: { bgcolor: dark() ? "#1c2128" : "#ffffff", bordercolor: grid, font: { color: ink } },
    } };
  };
  const draw = () => {
    for (const canvas of document.querySelectorAll("[data-plot]")) {
      const { data, layout } = plots[canvas.dataset.plot];
      // From the page's own background, so that nothing stays nothing in both themes.
      const traces = data.map((trace) => trace.type !== "heatmap" ? trace : { ...trace, colorscale: dark()
        ? [[0, "#1c2128"], [0.05, "#163a52"], [0.5, "#2f86c4"], [1, "#c6e6ff"]]
        : [[0, "#f6f8fa"], [0.05, "#cfe4f5"], [0.5, "#3d8fcb"], [1, "#08355c"]] });
      const narrow = canvas.clientWidth < 480;
      Plotly.react(canvas, traces, { ...layout, template: template(), autosize: true,
        margin: { ...layout.margin, l: narrow ? 40 : 64, r: 8 } },
      { responsive: true, displaylogo: false, displayModeBar: !narrow,
        modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] });
    }
  };
  const themes = ["auto", "light", "dark"];
  document.getElementById("theme").addEventListener("click", (event) => {
    root.dataset.theme = themes[(themes.indexOf(root.dataset.theme) + 1) % 3];
    event.target.textContent = `Theme: ${root.dataset.theme}`;
    draw();
  });
  media.addEventListener("change", draw);
  draw();
  root.dataset.ready = "true";
})();
