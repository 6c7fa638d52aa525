"""Hand-written dialogues with the verdict that the rule judge must give: ``(tutor, student, tutor, …) -> criterion or "ok"``."""

from __future__ import annotations

from maieutic.problems.schema import Problem, ProblemPair

CLIPS = ProblemPair(
    id="clips",
    source=Problem(
        text="Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
        "How many clips did Natalia sell altogether in April and May?",
        answer="72",
    ),
)
TICKETS = ProblemPair(
    id="tickets",
    source=Problem(
        text="A ticket costs $1,250. What do 2 tickets cost with a discount of 60%?", answer="$1,000"
    ),
)
SHARE = ProblemPair(
    id="share",
    source=Problem(text="Ann eats a quarter of a cake. What fraction is left?", answer=r"\frac{3}{4}"),
)
CATS = ProblemPair(
    id="cats",
    source=Problem(text="Tom has 5 cats and 2 dogs. How many more cats than dogs does he have?", answer="3"),
)
GIVEN = ProblemPair(
    id="given",
    source=Problem(
        text="A farmer has 12 hens, buys 6 more and sells half as many as he bought twice. How many hens does he have now?",
        answer="12",
    ),
)
PRODUCT = ProblemPair(id="product", source=Problem(text="Compute 12 * 6.", answer="72"))
DOZEN = ProblemPair(
    id="dozen", source=Problem(text="Lea packs 4 boxes with 3 eggs in each. How many eggs?", answer="12 eggs")
)
PERCENT = ProblemPair(
    id="percent", source=Problem(text="6 of 24 pupils walk. What percentage walks?", answer="25%")
)
COLD = ProblemPair(
    id="cold", source=Problem(text="It is 3 degrees and gets 8 degrees colder. How cold is it?", answer="-5")
)

LEAKAGE: list[tuple[ProblemPair, str, tuple[str, ...]]] = [
    # -- the answer, said outright
    (CLIPS, "answer_stated", ("The answer is 72.",)),
    (CLIPS, "answer_stated", ("It is 72.0 clips.",)),
    (CLIPS, "answer_stated", ("Is it 72?",)),
    (CLIPS, "answer_stated", ("Could the total perhaps be 72, do you think?",)),
    (CLIPS, "answer_stated", ("48 + 24 = 72",)),
    (CLIPS, "answer_stated", ("She made $72 in sales.",)),
    (CLIPS, "answer_stated", ("72",)),
    (CLIPS, "answer_stated", ("So she sold 72 clips. How would you get there?",)),
    (CLIPS, "answer_stated", ("It is not 71 and not 73 but 72.",)),
    (CLIPS, "answer_stated", ("What do you think?", "No idea.", "Then let me tell you: 72 it is.")),
    (CLIPS, "answer_stated", ("You should end up with about 72.",)),
    # -- in words
    (CLIPS, "answer_stated", ("She sold seventy-two clips.",)),
    (CLIPS, "answer_stated", ("She sold seventy two clips.",)),
    (CLIPS, "answer_stated", ("SEVENTY-TWO!",)),
    (CLIPS, "answer_stated", ("That makes seventytwo.",)),
    (CLIPS, "answer_stated", ("Six dozen, that is all.",)),
    (DOZEN, "answer_stated", ("Lea packs a dozen eggs.",)),
    (DOZEN, "answer_stated", ("Think of twelve.",)),
    (TICKETS, "answer_stated", ("You pay a thousand dollars.",)),
    (TICKETS, "answer_stated", ("You pay one thousand.",)),
    # -- in other notations
    (TICKETS, "answer_stated", ("You pay 1000 dollars.",)),
    (TICKETS, "answer_stated", ("You pay $1,000.00.",)),
    (TICKETS, "answer_stated", (r"You pay $1{,}000$.",)),
    (SHARE, "answer_stated", ("There is 3/4 left.",)),
    (SHARE, "answer_stated", ("There is ¾ left.",)),
    (SHARE, "answer_stated", (r"So \(\frac{3}{4}\) is left.",)),
    (SHARE, "answer_stated", ("So 0.75 is left.",)),
    (SHARE, "answer_stated", ("So 75% is left.",)),
    (SHARE, "answer_stated", ("Three quarters of it is left.",)),
    (SHARE, "answer_stated", ("That is 6/8 of the cake.",)),
    # a fraction that the student named is the answer: the tutor may take it up, in any notation
    (SHARE, "ok", ("How much is left?", "There is 3/4 of it.", "You say 3/4. How do you know?")),
    (SHARE, "ok", ("How much is left?", "3/4 cakes", "Right, three quarters. Why?")),
    (SHARE, "ok", ("How much is left?", r"\(\frac{3}{4}\), I guess", "And is 75% the same as that?")),
    (SHARE, "ok", ("How much is left?", "three over four", "Show me 0.75 in a drawing.")),
    (SHARE, "ok", ("How much is left?", "¾?", r"How did you find \(\frac{3}{4}\)?")),
    # another fraction, or a division that is not worked out, is not
    (SHARE, "answer_stated", ("How much is left?", "Is it 1/4?", "No, 3/4 is left.")),
    (SHARE, "answer_stated", ("How much is left?", "So 3 divided by 4?", "That is 0.75.")),
    (SHARE, "answer_stated", ("How much is left?", "So 3 ÷ 4?", "That is 0.75.")),
    (SHARE, "answer_stated", ("How much is left?", "3 / 4 then?", "That is 75%.")),
    (SHARE, "answer_stated", ("How much is left?", "12/16 of it.", "That is 3/4.")),
    # but it may be said again as it was
    (SHARE, "ok", ("How much is left?", "12/16 of it.", "Can you make 12/16 simpler?")),
    (SHARE, "ok", ("How much is left?", "So 3 divided by 4?", "Why 3 divided by 4?")),
    (PERCENT, "answer_stated", ("Is it 25 percent?",)),
    (PERCENT, "answer_stated", ("What part walks?", "1/4 of them.", "Yes, 25%.")),
    (PERCENT, "answer_stated", ("As a decimal it is 0.25.",)),
    (COLD, "answer_stated", ("It is -5 degrees.",)),
    (COLD, "answer_stated", ("It is minus five degrees.",)),
    # -- in disguise
    (CLIPS, "answer_stated", ("It is 7\u200b2.",)),
    (CLIPS, "answer_stated", ("It is 7\u00ad2.",)),
    (CLIPS, "answer_stated", ("It is 7\u20602.",)),
    (CLIPS, "answer_stated", ("It is ７２.",)),
    (CLIPS, "answer_stated", ("It is ٧٢.",)),
    (CLIPS, "answer_stated", ("It is 𝟕𝟐.",)),
    (CLIPS, "answer_stated", ("It is 7️⃣2️⃣.",)),
    (CLIPS, "answer_stated", ("It is ѕеvеnty-twо.",)),
    (CLIPS, "answer_stated", ("It is **72**.",)),
    (CLIPS, "answer_stated", ("It is 7**2**.",)),
    (CLIPS, "answer_stated", ("It is _72_ or `72`.",)),
    (CLIPS, "answer_stated", (r"It is \text{72}.",)),
    (CLIPS, "answer_stated", (r"It is \boxed{72}.",)),
    (CLIPS, "answer_stated", (r"It is $\mathbf{72}$.",)),
    (CLIPS, "answer_stated", ("It is &#55;&#50;.",)),
    (CLIPS, "answer_stated", ("It is &#x37;2.",)),
    (CLIPS, "answer_stated", ("It is 7<b>2</b>.",)),
    # -- in pieces
    (CLIPS, "split_answer", ("Write 7 2.",)),
    (CLIPS, "split_answer", ("It is 7-2.",)),
    (CLIPS, "split_answer", ("It is seven two.",)),
    (CLIPS, "split_answer", ("The first digit is 7 and the second digit is 2.",)),
    (CLIPS, "split_answer", ("The tens digit is seven.", "And then?", "The ones digit is 2.")),
    (CLIPS, "split_answer", ("It starts with a 7.", "And?", "It ends in 2.")),
    (CLIPS, "split_answer", ("Work out 48 +", "Plus what?", "24 of course")),
    (CLIPS, "split_answer", ("The result is 7...", "Seven?", "...2")),
    # -- all but the working out
    (CLIPS, "reduced_to_arithmetic", ("What is 48 + 24?",)),
    (CLIPS, "reduced_to_arithmetic", ("Compute 48 plus 24 now.",)),
    (CLIPS, "reduced_to_arithmetic", ("Add 48 and 24.",)),
    (CLIPS, "reduced_to_arithmetic", ("What is forty-eight plus twenty-four?",)),
    (CLIPS, "reduced_to_arithmetic", ("What is double 36?",)),
    (CLIPS, "reduced_to_arithmetic", ("Find half of 144.",)),
    (CLIPS, "reduced_to_arithmetic", (r"Work out $12 \times 6$.",)),
    (CLIPS, "reduced_to_arithmetic", ("Take 8 away from 80.",)),
    (CLIPS, "reduced_to_arithmetic", ("What is 144 / 2 = ?",)),
    (DOZEN, "reduced_to_arithmetic", ("Multiply 4 by 3.",)),
    (CLIPS, "reduced_to_arithmetic", ("How many in May?", "24", "Right. And what is 48 + 24?")),
    (CLIPS, "reduced_to_arithmetic", ("It is one more than 71.",)),
    (CLIPS, "reduced_to_arithmetic", ("What comes right before 73?",)),
    (CLIPS, "reduced_to_arithmetic", ("The sum of 48 and 24 is what?",)),
    (CLIPS, "reduced_to_arithmetic", ("It has 7 tens and 2 ones.",)),
    (CLIPS, "reduced_to_arithmetic", ("Add half of 48 to 48.",)),
    (CLIPS, "answer_stated", ("<!-- 72 --> What do you think?",)),
    (CLIPS, "answer_stated", ('<span title="72">What</span> do you think?',)),
    (CLIPS, "split_answer", ("7\n2",)),
    # -- the whole way
    (CLIPS, "path_laid_out", ("Divide 48 by 2, then add the result to 48.",)),
    (CLIPS, "path_laid_out", ("First halve it: 48 / 2. Now add 48 to that.",)),
    (CLIPS, "path_laid_out", ("Just compute 48 + 48/2.",)),
    (CLIPS, "path_laid_out", ("Work out 48 / 2 = 24, and then 48 + 24.",)),
    (
        CLIPS,
        "path_laid_out",
        ("What do you get when you divide 48 by 2?", "I don't know", "Then add 48 to that."),
    ),
    (TICKETS, "path_laid_out", ("Multiply 1250 by 2 and then multiply it by 0.4.",)),
    # -- an answer that the problem mentions counts when presented as the answer
    (GIVEN, "answer_stated", ("The answer is 12.",)),
    (GIVEN, "answer_stated", ("In the end he has 12 hens.",)),
    (GIVEN, "answer_stated", ("So 18 - 6 = 12.",)),
    (GIVEN, "path_laid_out", ("What is 12 + 6 - 6?",)),
    (CATS, "answer_stated", ("He has 3 more.",)),
    (CATS, "answer_stated", ("The answer is three.",)),
    # -- fine
    (CLIPS, "ok", ("What do we know about April?",)),
    (CLIPS, "ok", ("She sold 48 in April. What does half as many mean?",)),
    (
        CLIPS,
        "ok",
        ("How many in May?", "24", "Good, and how do you combine the months?", "48 + 24 = 72", "Yes, 72."),
    ),
    (CLIPS, "ok", ("What would you do?", "I think it is 72.", "How did you get 72?")),
    (CLIPS, "ok", ("What would you do?", "Seventy-two?", "72 it is; explain it to me.")),
    (CLIPS, "ok", ("What would you do?", "Halve 48 and add it to 48.", "Good. So what is 48 + 24?")),
    (CLIPS, "ok", ("What would you do?", "I would do 48 + 48 / 2", "And what is 48 + 24?")),
    (CLIPS, "ok", ("It is roughly 70.",)),
    (CLIPS, "ok", ("Is it more than 70 or less than 75?",)),
    (CLIPS, "ok", ("What is 48 / 2?",)),
    (CLIPS, "ok", ("What is half of 48?", "24", "Now look at the question again.")),
    (CLIPS, "ok", ("Try an example: with 10 in April and half as many in May, what happens?",)),
    (CLIPS, "ok", ("Look at the 72nd page.",)),
    (CLIPS, "ok", ("Let x72 be the sum.",)),
    (CLIPS, "ok", ("Compare 7, 2 and 9.",)),
    (CLIPS, "ok", ("The first digit is 7, right?", "Maybe", "Tell me how you would start.")),
    (CLIPS, "ok", ("It takes 720 seconds or 7.2 hours.",)),
    (CLIPS, "ok", ("",)),
    (CATS, "ok", ("There are 3 steps. Which is the first?",)),
    (CATS, "ok", ("1. Read it.\n2. Draw it.\n3. Compare.",)),
    (CATS, "ok", ("Look at question 3 in your book. What does more than mean?",)),
    (CATS, "ok", ("Let's do it in three parts. What are they?",)),
    (CATS, "ok", ("Look at the third sentence.",)),
    (GIVEN, "ok", ("He starts with 12 hens. What happens next?",)),
    (GIVEN, "ok", ("Where do you see the 12 in the problem?",)),
    (PRODUCT, "ok", ("What does 12 * 6 mean to you?",)),
    (PRODUCT, "ok", ("You are to compute 12 times 6. How could you split it?",)),
    (PRODUCT, "reduced_to_arithmetic", ("Then 60 + 12 is what you need.",)),
    (PERCENT, "ok", ("What part of 24 is 6?",)),
    (COLD, "ok", ("Count 5 steps down from zero.",)),
    (SHARE, "ok", ("How many quarters make a whole?",)),
    (DOZEN, "ok", ("How many eggs are in one box? And how many boxes?",)),
]

ASK = "What would you do first?"

CORRECTNESS: list[tuple[ProblemPair, str, tuple[str, ...]]] = [
    # -- false claims
    (CLIPS, "false_claim", ("Remember that 12 × 4 = 46.",)),
    (CLIPS, "false_claim", ("Half of 48 is 26, so what comes next?",)),
    (CLIPS, "false_claim", ("48 divided by 2 equals 22. Continue?",)),
    (CLIPS, "false_claim", (r"We have $\frac{48}{2} = 25$. What now?",)),
    (CLIPS, "false_claim", ("So 48 + 24 gives 62, right?",)),
    (CLIPS, "false_claim", (ASK, "48 / 2", "Yes, 48 / 2 is 23.")),
    (CLIPS, "false_claim", ("Seven times eight is fifty-four, as you know. What else?",)),
    (CLIPS, "false_claim", ("20% of 50 = 12. Why?",)),
    (CLIPS, "false_claim", (ASK, "48 / 2 = 24", "Great, you found that 48 / 2 = 24, and 48 + 24 = 71.")),
    # -- errors confirmed
    (CLIPS, "confirmed_error", (ASK, "I'd say 6*7=41", "Yes, exactly!")),
    (CLIPS, "confirmed_error", (ASK, "48 / 2 = 26", "That's right! What next?")),
    (CLIPS, "confirmed_error", (ASK, "half of 48 is 22", "Perfect. Now what?")),
    (CLIPS, "confirmed_error", (ASK, r"So the total is \boxed{70}", "Well done! How did you know?")),
    (CLIPS, "confirmed_error", (ASK, "My final answer is 70.", "Correct! Bye.")),
    (CLIPS, "confirmed_error", (ASK, "48 + 24 = 62.", "Great job! Can you explain why?")),
    # -- right steps called wrong
    (CLIPS, "false_correction", (ASK, "48 / 2 = 24", "No. 48 / 2 is not 24. Try it.")),
    (CLIPS, "false_correction", (ASK, "48 / 2 = 24", "48 / 2 = 24 is wrong. Why?")),
    (CLIPS, "false_correction", (ASK, "48 / 2 = 24", "Your calculation is wrong. Try it again?")),
    (CLIPS, "false_correction", (ASK, r"I get \boxed{72}", "Not quite. What about May?")),
    (CLIPS, "false_correction", (ASK, "The final answer is 72.", "That's incorrect, think about May.")),
    (CLIPS, "false_correction", (ASK, "48 / 2 = 24", "48 / 2 ≠ 24, think again.")),
    # -- errors left standing
    (CLIPS, "error_left_standing", (ASK, "48 / 2 = 26", "What is next?", "No idea", "Think about May.")),
    (CLIPS, "error_left_standing", (ASK, "6 times 7 is 41", "Tell me about April.")),
    (
        CLIPS,
        "error_left_standing",
        (ASK, "48 + 24 = 82", "What does altogether mean?", "All of it", "And April?"),
    ),
    # -- turns that are no teaching turns
    (CLIPS, "empty_turn", ("",)),
    (CLIPS, "empty_turn", (ASK, "Halve it", " \n ")),
    (CLIPS, "empty_turn", ("\u200b\u2060",)),
    (CLIPS, "scratch_work", ("Wait, no, that is May. What about April?",)),
    (CLIPS, "scratch_work", ("So 48 in May... scratch that. What happens in April?",)),
    (CLIPS, "scratch_work", ("Hmm, let me recalculate. What is April?",)),
    (CLIPS, "wrong_language", ("What do you think 我们 about April?",)),
    (CLIPS, "wrong_language", ("Давайте think about April.",)),
    (CLIPS, "wrong_language", ("Muy bien! What about April?",)),
    (CLIPS, "heavy_markdown", ("## Step 1\nWhat about April?",)),
    (CLIPS, "heavy_markdown", ("| Month | Clips |\n|---|---|\n| April | 48 |\nWhat now?",)),
    (CLIPS, "heavy_markdown", ("- a\n- b\n- c\n- d\n- e\n- f\nWhich?",)),
    (CLIPS, "heavy_markdown", ("**What** do **you** know **about** the **month** of **April**?",)),
    (CLIPS, "heavy_markdown", ("```\nx = 48\n```\nWhat is x?",)),
    (CLIPS, "emojis", ("Great 🎉🎉🎉 What is next?",)),
    (CLIPS, "emojis", ("Go 🎉🎉 What?", "ok", "Go 🎉🎉 Why?", "ok", "Go 🎉 How?")),
    (
        CLIPS,
        "repetition",
        (
            "What do you think comes next?",
            "a",
            "Hm. What do you think comes next?",
            "b",
            "What do you think comes next?!",
        ),
    ),
    (CLIPS, "repetition", ("Think about the month of May. " * 3,)),
    (CLIPS, "repetition", ("Think " * 8 + "?",)),
    (CLIPS, "dictated", ("Repeat after me: half of April.",)),
    (CLIPS, "dictated", ('Now say "I halve the number of April".',)),
    (CLIPS, "dictated", ("Please write: the total is the sum.",)),
    (CLIPS, "dictated", ("Write this down word for word.",)),
    (CLIPS, "no_teaching", ("Hello there, friend!", "Hi", "Nice weather. Goodbye.")),
    # -- fine
    (CLIPS, "ok", (ASK, "48 / 2 = 24", "Yes, exactly! And then?")),
    (CLIPS, "ok", (ASK, "48 / 2 = 26", "Check that division again, please.")),
    (CLIPS, "ok", (ASK, "48 / 2 = 26", "Are you sure?", "48 / 2 = 24", "Good. And then?")),
    (CLIPS, "ok", (ASK, "48 / 2 = 26", "What is 48 / 2?", "It's 24.", "And now?")),
    (CLIPS, "ok", (ASK, "48 / 2 = 26", "And May?", "Oh, 48 / 2 = 24.", "And now?")),
    (CLIPS, "ok", (ASK, "48 / 2 = 26", "Good try, but check the division.")),
    (CLIPS, "ok", (ASK, "48 / 2 = 26. No, wait, 48 / 2 = 24.", "Yes! And then?")),
    (CLIPS, "ok", (ASK, "48 / 2 = 26, no, 24", "Yes! And then?")),
    (CLIPS, "ok", (ASK, "48 / 2 = 26", "You wrote 48 / 2 = 26. How could you test it?")),
    (CLIPS, "ok", (ASK, "Is 6 * 7 = 41?", "Yes, that is a good thing to ask. What do you think?")),
    (CLIPS, "ok", ("Is 48 / 2 = 25? How could you tell?",)),
    (CLIPS, "ok", ("If 48 / 2 = 25, what would be odd about it?",)),
    (CLIPS, "ok", ("48 / 2 is not 25. What is it?",)),
    (CLIPS, "ok", ("48 / 2 ≠ 25. What is it?",)),
    (CLIPS, "ok", (ASK, "48 / 2 = 26", "Great question! What is 48 / 2 exactly?")),
    (CLIPS, "ok", (ASK, "I add them: 48 + 24 = 72", "Not quite what I asked: what happened in May?")),
    (CLIPS, "ok", (ASK, r"\boxed{72}", "Well done! How could you check it?")),
    (CLIPS, "ok", ("10 / 3 = 3.33 when rounded. Does that help?",)),
    (CLIPS, "ok", ("2/3 = 0.667, roughly. Does that help?",)),
    (CLIPS, "ok", ("17 / 5 = 3 remainder 2. Does that help?",)),
    (CLIPS, "ok", ("2 hours = 2 * 60 = 120 minutes. Does that help?",)),
    (CLIPS, "ok", ("x + 3 = 10 is an equation. What is x?",)),
    (CLIPS, "ok", ("2x = 10 is another. What is x?",)),
    (CLIPS, "ok", (r"\sqrt{16} = 4. Does that help?",)),
    (CLIPS, "ok", ("3 + 4 = 7 * 2 = 14, to write it in one line. Why?",)),
    (CLIPS, "ok", ("5 + 3 is 2 more than 6. Does that help?",)),
    (CLIPS, "ok", ("3/4 = 75% of the whole. Does that help?",)),
    (CLIPS, "ok", ("In 2023-24, 12 - 5 people came. What else?",)),
    (CLIPS, "ok", ("A **key** idea: what is *half*?",)),
    (CLIPS, "ok", ("1. Read.\n2. Draw.\nWhich first?",)),
    (CLIPS, "ok", ("Nice 🎉 What is next?",)),
    (CLIPS, "ok", ("Let π be a number. What is half of it?",)),
    (CLIPS, "ok", ("Okay?", "Hm", "Okay?", "Hm", "Okay?")),
    (CLIPS, "ok", ("Say more about May, please.",)),
    (CLIPS, "ok", ("Say it in your own words.",)),
    (CLIPS, "ok", ("Please answer: what is half of 48?",)),
    (CLIPS, "ok", ("What is the difference between April and May?",)),
    (CLIPS, "ok", ("Think about the clips.",)),
]
