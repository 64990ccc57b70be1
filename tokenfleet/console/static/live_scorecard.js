/* This fleet's plan compared with what it has served; behind a button, since it replays the traffic. */

import { Refused, Unreachable, ask, offers } from "./api.js";
import { byId, say, table } from "./dom.js";
import { counted, duration, number, share } from "./format.js";

const PATH = "/v1/plans/{job}/scorecard";

/** Show the section where the API keeps plans. */
export async function offerScorecard() {
  byId("scorecard").hidden = !(await offers(PATH));
  byId("compare").addEventListener("click", () => void compare());
}

async function compare() {
  const button = byId("compare");
  button.disabled = true;
  say(byId("scorecard-says"), "Comparing…");
  try {
    show(await ask("GET", PATH.replace("{job}", "last")));
  } catch (error) {
    if (!(error instanceof Refused || error instanceof Unreachable)) throw error;
    say(byId("scorecard-says"), `${error.message}.`);
  }
  button.disabled = false;
}

function show(card) {
  say(
    byId("scorecard-says"),
    `Plan ${card.plan}: ${counted(card.requests, "request")} finished. ${card.says.map((line) => `${line}.`).join(" ")}`,
  );
  const rows = [
    ...quantiles("TTFT", card.ttft_s),
    ...quantiles("TPOT", card.tpot_s),
    ...(card.attainment
      ? [
          [
            "SLO attainment",
            share(card.attainment.planned),
            share(card.attainment.predicted),
            share(card.attainment.observed),
            "",
          ],
        ]
      : []),
    ...(card.classes ?? []).map(({ name, planned, predicted, observed }) => [
      `SLO attainment, class ${name}`,
      share(planned),
      share(predicted),
      share(observed),
      "",
    ]),
  ];
  const columns = [
    { name: "figure" },
    ...["planned", "predicted", "observed", "ratio"].map((name) => ({ name, number: true })),
  ];
  const shown = rows.length
    ? [
        table(
          "Planned; predicted for the observed traffic; observed; and the ratio of observed to predicted",
          columns,
          rows,
        ),
      ]
    : [];
  byId("scorecard-table").replaceChildren(...shown);
}

function quantiles(name, figures) {
  return Object.entries(figures ?? {}).map(([quantile, f]) => [
    `${name} ${quantile}`,
    duration(f.planned),
    duration(f.predicted),
    duration(f.observed),
    number(f.ratio),
  ]);
}
