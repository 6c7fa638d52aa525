"""What stored runs of the micro-classroom say about the reward's conditions: a section of the report of such a run.

A run of a few minutes shows one arm with one seed. The comparison of arms over seeds comes from results that ship with the
package (:mod:`maieutic.micro.stored`); where there are none, the section says so.
"""

from __future__ import annotations

from maieutic.report.page import esc
from maieutic.report.run_data import RunData

_MARKS = {True: ("good", "holds"), False: ("bad", "does not hold"), None: ("warn", "not tested")}


def ablations_html(data: RunData) -> str:
    """The section, or nothing for a run in another environment than ``micro``."""
    if data.get("env.name") != "micro":
        return ""
    from maieutic.micro.stored import load_stored

    found, why = load_stored()
    title = "<h2>What the conditions do: arms over seeds</h2>"
    if found is None:
        text = f"{esc(why)} <code>make science</code> runs the arms and stores them."
        return f'<section id="ablations">{title}<p class="card">{text}</p></section>'
    notes = [f"<p class='chip warn'>{esc(why)}</p>"] if why else []
    claims = "".join(
        f"<li><span class='chip {_MARKS[f.holds][0]}'>{_MARKS[f.holds][1]}</span> {esc(f.claim)}: {esc(f.evidence)}</li>"
        for f in found.findings
    )
    rows = "".join(
        f"<tr><th scope='row'>{esc(arm.name)}</th><td>{len(arm.seeds)}</td>"
        + "".join(f"<td>{x[0]:.2f} [{x[1]:.2f}, {x[2]:.2f}]</td>" for x in (arm.leak, arm.masked, arm.own))
        + "</tr>"
        for arm in found.arms
    )
    table = (
        "<div class='scroll'><table><thead><tr><th>Arm</th><th>Seeds</th><th>Leak rate</th><th>Gain, tutor hidden</th>"
        f"<th>Gain, own measure</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )
    return (
        f'<section id="ablations">{title}<div class="card">{"".join(notes)}'
        f'<div class="figure">{found.figure()}</div>{table}<ul class="claims">{claims}</ul>'
        f"<p class='muted'>Stored results, not of this run: {found.problems} held-out problems a seed; 95 % intervals over seeds "
        "and problems. A constructed world: it shows mechanisms, not sizes of effects.</p></div></section>"
    )
