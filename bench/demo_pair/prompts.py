"""Training prompts by category, made from templates and from Python's own docstrings.

Everything is drawn with a seed, so two runs give the same prompts. `held_out.json` beside this
file lists the prompts that training never sees; `training_prompts` drops them, should a template
ever produce one.
"""

from __future__ import annotations

import ast
import json
import random
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent

# Share of each category in the training set. Code is what a local user drafts most.
SHARES = {
    "code": 0.30,
    "json": 0.13,
    "arithmetic": 0.09,
    "extraction": 0.08,
    "lists": 0.12,
    "chat": 0.13,
    "stories": 0.09,
    "translation": 0.06,
}


@dataclass(frozen=True)
class Prompt:
    category: str
    text: str


def words(text: str) -> list[str]:
    return [part.strip() for part in text.split("|")]


NAMES = words(
    "Anna|Ben|Carla|David|Elena|Farid|Grace|Hugo|Ines|Jonas|Keiko|Liam|Maria|Nadia|Omar|Priya|"
    "Quentin|Rosa|Samir|Tara|Umar|Vera|Wei|Ximena|Yusuf|Zoe|Peter|Lucia|Tom|Mei|Sofia|Ivan"
)
SURNAMES = words(
    "Smith|Garcia|Novak|Khan|Tanaka|Olsen|Brown|Rossi|Silva|Martin|Kim|Kowalski|Haddad|Jones|"
    "Schmidt|Dubois|Chen|Patel|Larsen|Moore"
)
CITIES = words(
    "Paris|Berlin|Lagos|Tokyo|Madrid|Oslo|Toronto|Cairo|Lima|Sydney|Vienna|Prague|Delhi|Boston|"
    "Seoul|Nairobi|Dublin|Athens|Lisbon|Chicago"
)
TOPICS = words(
    "the water cycle|photosynthesis|gravity|volcanoes|the Roman Empire|black holes|vaccines|"
    "democracy|inflation|the internet|batteries|climate change|dinosaurs|jazz music|chess|"
    "the French Revolution|DNA|plate tectonics|bread making|the moon|electric cars|sleep|"
    "the stock market|recycling|bees|coral reefs|the Great Wall of China|solar panels|coffee|"
    "machine learning|the human heart|earthquakes|the Silk Road|tea|glaciers|rainbows|magnets|"
    "the printing press|penguins|deserts|antibiotics|bicycles|the Olympic Games|mushrooms|"
    "public libraries|rivers|the piano|airplanes|cheese|the solar system|spiders|trains|"
    "ancient Egypt|poetry|taxes|insurance|budgeting|gardening|meditation|time zones|operating "
    "systems|databases|encryption|compilers|robots|satellites|nuclear energy|wind power|"
    "the Industrial Revolution|whales|the Amazon rainforest|origami|marathon running|yoga|"
    "swimming|skiing|basketball|tennis|photography|architecture|bridges|skyscrapers|castles|"
    "pyramids|the Renaissance|ballet|opera|rock music|the guitar|the violin|drums|painting|"
    "sculpture|pottery|knitting|sewing|carpentry|welding|plumbing|electricity|semiconductors|"
    "microscopes|telescopes|comets|Mars|Jupiter|the speed of light|sound waves|heat|friction|"
    "chemical reactions|the periodic table|acids and bases|carbon|oxygen|iron|gold|diamonds|salt|"
    "sugar|honey|chocolate|olive oil|rice|potatoes|tomatoes|apples|bananas|spices|fermentation|"
    "nutrition|vitamins|proteins|the immune system|the brain|memory|dreams|emotions|habits|"
    "teamwork|leadership|negotiation|public speaking|job interviews|small businesses|marketing|"
    "accounting|banks|currencies|trade|supply chains|shipping|highways|traffic lights|maps|the "
    "compass|GPS|mobile phones|email|social media|search engines|web browsers|spreadsheets|word "
    "processors|passwords|backups|open source software|version control|unit testing|recursion|"
    "sorting algorithms|hash tables|linked lists|regular expressions|HTTP|JSON|XML|SQL|Python|"
    "JavaScript|the Linux kernel|virtual machines|cloud computing|neural networks|statistics|"
    "probability|geometry|algebra|calculus|prime numbers|fractions|logic|ethics|philosophy|"
    "Socrates|Shakespeare|Mozart|Leonardo da Vinci|Marie Curie|Albert Einstein|Isaac Newton|"
    "Charles Darwin|Ada Lovelace|Cleopatra|Genghis Khan|Napoleon|the Vikings|the Aztecs|samurai|"
    "the Cold War|the United Nations|elections|constitutions|courts|police|firefighters|nurses|"
    "teachers|farmers|pilots|sailors|astronauts|camels|elephants|lions|wolves|cats|dogs|horses|"
    "cows|chickens|owls|eagles|sharks|octopuses|frogs|snakes|ants|butterflies|oak trees|bamboo|"
    "roses|tulips|orchids|cacti|algae|bacteria|viruses|fungi|soil|compost|irrigation|floods|"
    "droughts|hurricanes|tornadoes|avalanches|caves|islands|waterfalls|the Sahara|the Himalayas|"
    "Antarctica|Iceland|Japan|Brazil|Kenya|India|Canada|Australia|Mexico|Greece|Turkey|Vietnam"
)
THINGS = words(
    "a fruit|an animal|a country|a sport|a color|a vegetable|a musical instrument|a tree|a river|"
    "a planet|a book|a movie genre|a programming language|a profession|a kitchen tool|a vehicle|"
    "a board game|a flower|a bird|a dessert|a school subject|a piece of furniture|a spice|a city"
)
TASKS = words(
    "reverses a string|checks whether a number is prime|computes the factorial of a number|finds "
    "the maximum of a list|counts the vowels in a string|sorts a list of numbers|merges two "
    "sorted lists|checks whether a string is a palindrome|computes the Fibonacci sequence|removes "
    "duplicates from a list|computes the average of a list|converts Celsius to Fahrenheit|counts "
    "the words in a text|finds the longest word in a sentence|flattens a nested list|computes the "
    "greatest common divisor of two numbers|checks whether two strings are anagrams|converts a "
    "number to binary|capitalizes every word of a sentence|finds the second largest number in a "
    "list|sums the digits of a number|reads a file line by line|writes a list to a file|counts "
    "how often each character occurs|performs a binary search|transposes a matrix|multiplies two "
    "matrices|rotates a list by k positions|validates an email address|computes the power of a "
    "number|finds all even numbers in a list|swaps the keys and values of a dictionary|groups "
    "words by their length|finds the intersection of two lists|splits a list into chunks|"
    "generates a random password|computes the area of a circle|checks whether a year is a leap "
    "year|converts a string to an integer|prints a multiplication table|finds missing numbers in "
    "a range|computes the median of a list|implements bubble sort|implements a stack|implements a "
    "queue|implements a linked list|parses a CSV file|counts lines in a file|formats a date|"
    "computes compound interest|computes the distance between two points|downloads a web page|"
    "writes a dictionary to a JSON file|lists the files of a directory|deletes empty directories|"
    "copies a file|counts the lines of a file|searches a text for a pattern|replaces a word in a "
    "file|computes the days between two dates|converts seconds to hours and minutes|sorts a list "
    "of dictionaries by a key|merges two dictionaries|inverts a binary tree|traverses a tree in "
    "order|finds the shortest path in a graph|implements depth-first search|implements a queue "
    "with two stacks|implements quicksort|implements merge sort|implements insertion sort|"
    "computes a moving average|normalizes a list of numbers|computes the standard deviation|"
    "rounds a number to two digits|checks whether a number is a perfect square|lists the prime "
    "factors of a number|computes the least common multiple|converts decimal to hexadecimal|"
    "encodes a text with a Caesar cipher|hashes a password|checks the strength of a password|"
    "removes punctuation from a text|counts the sentences of a text|wraps a text to a given width|"
    "censors given words|joins a list of strings with commas|pads a number with zeros|parses a "
    "URL|sends an HTTP request|reads settings from a file|logs messages to a file|retries a "
    "function three times|caches the results of a function|asks the user for a number until it is "
    "valid|plays rock, paper, scissors|draws a triangle of stars|simulates rolling two dice|"
    "shuffles a list|picks a random element|converts miles to kilometers|computes the body mass "
    "index|computes a grade from a score|prints the numbers from 1 to 100 with FizzBuzz|checks "
    "whether a list is sorted|finds the first repeated element|finds pairs with a given sum|"
    "computes the product of a list|zips two lists into a dictionary|filters a list of words by "
    "length|partitions a list by a condition|finds the index of an element"
)
CLASSES = words(
    "a bank account|a rectangle|a library book|a shopping cart|a student|a car|a stack|a queue|"
    "a temperature sensor|a playlist|a parking lot|a matrix|a timer|a user profile|an inventory|"
    "a binary tree|a circle|an employee|a hotel room|a deck of cards|a phone book|a to-do list|"
    "a point in space|a fraction|a vending machine|a calendar event|a blog post|a train ticket"
)
WISHES = words(
    "Explain how it works.|Add a docstring.|Add type hints.|Handle errors.|Include an example "
    "call.|Keep it short.|Use a loop.|Use recursion.|Add comments.|Do not use any library.|Show "
    "the output for an example.|Return None when the input is empty.|Raise a ValueError for bad "
    "input.|Explain its time complexity.|Write a test for it as well.|Use a list comprehension.|"
    "Name it solve.|Show the code first, then explain it."
)
LANGUAGES = words("Python|Python|Python|Python|JavaScript|Java|C|C++|Go|Rust|SQL|Bash|TypeScript")
PHRASES = words(
    "Good morning, how are you?|Where is the train station?|I would like a cup of coffee.|The "
    "weather is nice today.|My name is {name}.|The book is on the table.|We are going to the "
    "beach tomorrow.|How much does this cost?|She reads a newspaper every morning.|I have two "
    "brothers and one sister.|The children are playing in the garden.|Thank you for your help.|"
    "Can you open the window, please?|He works in a hospital.|The restaurant closes at ten "
    "o'clock.|I lost my keys yesterday.|They live in a small house near {city}.|What time does "
    "the museum open?|I am learning a new language.|The cat is sleeping on the chair.|Do you "
    "speak English?|The train to {city} leaves at noon.|My friend {name} likes to cook.|It is "
    "raining, take an umbrella.|The water is very cold.|I need a doctor.|This is my favorite "
    "song.|We bought fresh bread and cheese.|The meeting starts at nine.|Happy birthday, {name}!|"
    "The bridge is closed this week.|Please write your name here.|The teacher asked a question."
)
TONGUES = words("French|Spanish|German|Italian|Portuguese|Dutch")
HEROES = words(
    "a lonely lighthouse keeper|a young inventor|a talking fox|a retired sailor|a curious robot|"
    "a brave little mouse|a lost astronaut|a clumsy wizard|a baker named {name}|two sisters|an "
    "old clock maker|a girl who could talk to birds|a dragon who feared fire|a travelling "
    "musician|a detective from {city}|a gardener|a boy and his kite|a forgotten king|a shy ghost|"
    "a train conductor|a painter named {name}|a fisherman|a librarian|a stray dog"
)
PLACES = words(
    "in a small village|on a distant island|in {city}|in a forest|at the bottom of the sea|on the "
    "moon|in an old library|during a long winter|in a desert|in a castle|on a night train|after a "
    "great storm|in a market|high in the mountains|in a quiet harbor|in the year 2150"
)
QUESTIONS = words(
    "How do I learn to cook?|What should I do when I cannot sleep?|How can I save money?|What is "
    "the best way to learn a language?|How do I prepare for a job interview?|Can you help me plan "
    "a birthday party?|What is a healthy breakfast?|How can I stay motivated?|How do I write a "
    "good email?|What should I pack for a trip to {city}?|How do I take care of a plant?|What is "
    "a good gift for {name}?|How can I make new friends?|How do I start running?|What is your "
    "favorite book?|How do I fix a flat tire?|How can I reduce stress?|How do I clean a keyboard?|"
    "What is the capital of France?|How do I choose a laptop?|How can I improve my handwriting?|"
    "How do I make a budget?|How should I study for an exam?|What can I cook with rice and eggs?|"
    "How do I apologize to a friend?|How can I drink more water?|What is a good hobby?|How do I "
    "train a puppy?|How do I back up my files?|Why is the sky blue?|How do vaccines work?"
)
FIELDS = words(
    "name|age|email|city|price|quantity|title|author|year|color|status|phone|country|rating|tags|"
    "address|date|category|id|weight|height|score|description|language|genre|duration|brand"
)
RECORDS = words(
    "a person|a book|a product|a movie|a recipe|a car|a city|a student|an employee|a song|a "
    "restaurant|a hotel booking|a weather report|an invoice|a flight|a pet|a course|a football "
    "match|a computer|a museum|a plant|a bank transaction|a blog post|a sensor reading|a package"
)
ITEMS = words("apples|books|pencils|tickets|cookies|stamps|chairs|bottles|shirts|marbles|eggs|cups")


def pick(rng: random.Random, options: list[str]) -> str:
    text = rng.choice(options)
    if "{" in text:
        text = text.format(name=rng.choice(NAMES), city=rng.choice(CITIES))
    return text


def documented_functions() -> list[tuple[str, str, str]]:
    """(name, first docstring paragraph, source) of short functions of the standard library."""
    found = []
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef):
                continue
            doc = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
            source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            source = textwrap.dedent(source)
            if 20 < len(doc) < 200 and not node.name.startswith("_"):
                found.append((node.name, doc, source))
    return found


def module_notes() -> list[str]:
    """Opening paragraphs of the standard library's module docstrings: real prose to work on."""
    root = Path(sysconfig.get_paths()["stdlib"])
    notes = []
    for path in sorted([*root.glob("*.py"), *root.glob("*/*.py")]):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        try:
            doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        except (SyntaxError, UnicodeDecodeError):
            continue
        for part in doc.split("\n\n")[:3]:
            flat = " ".join(part.split())
            if 80 < len(flat) < 600:
                notes.append(flat)
    return notes


def package_notes() -> list[str]:
    """One-line descriptions of the Debian packages on this machine; empty elsewhere."""
    status = Path("/var/lib/dpkg/status")
    text = status.read_text(encoding="utf-8", errors="replace") if status.exists() else ""
    lines = [line for line in text.splitlines() if line.startswith("Description: ")]
    return sorted({line.removeprefix("Description: ") for line in lines})


class Maker:
    """Draws prompts of each category; `own`: of the templates alone, without others' text."""

    def __init__(self, seed: int, own: bool = False) -> None:
        self.rng = random.Random(seed)
        self.functions = [] if own else documented_functions()
        self.notes = [] if own else module_notes()
        self.packages = [] if own else package_notes() or self.notes

    def code(self) -> str:
        rng = self.rng
        language = pick(rng, LANGUAGES)
        forms: list[Callable[[], str]] = [
            lambda: f"Write a {language} function that {pick(rng, TASKS)}.",
            lambda: f"Write a {language} function that {pick(rng, TASKS)}. Only show the code.",
            lambda: f"Write a Python function that {pick(rng, TASKS)}. {pick(rng, WISHES)}",
            lambda: f"Write a Python function that {pick(rng, TASKS)}. {pick(rng, WISHES)}",
            lambda: f"Write a Python class for {pick(rng, CLASSES)} with a few useful methods.",
            lambda: f"Write a Python class for {pick(rng, CLASSES)}. {pick(rng, WISHES)}",
            lambda: f"Write a small {language} program that {pick(rng, TASKS)} and prints it.",
            lambda: f"Write unit tests in Python for a function that {pick(rng, TASKS)}.",
            lambda: f"Show an example of how to use Python to do this: {pick(rng, TASKS)}.",
            lambda: (
                f"Write two Python functions, one that {pick(rng, TASKS)} and one that "
                f"{pick(rng, TASKS)}."
            ),
        ]
        if self.functions:
            forms += self.about_functions()
        return rng.choice(forms)()

    def about_functions(self) -> list[Callable[[], str]]:
        name, doc, source = self.rng.choice(self.functions)
        forms: list[Callable[[], str]] = [
            lambda: f"Write a Python function `{name}`. {doc}",
            lambda: f"Implement this in Python: {doc}",
            lambda: f'def {name}():\n    """{doc}"""\n\nComplete this Python function.',
        ]
        if len(source) < 700:
            forms += [
                lambda: f"Explain what this code does:\n\n```python\n{source}\n```",
                lambda: f"Rewrite this function with type hints:\n\n```python\n{source}\n```",
                lambda: f"Write a docstring for this function:\n\n```python\n{source}\n```",
            ]
        return forms

    def json(self) -> str:
        rng = self.rng
        record = pick(rng, RECORDS)
        fields = ", ".join(rng.sample(FIELDS, rng.randint(3, 5)))
        person = f"{pick(rng, NAMES)} {pick(rng, SURNAMES)}"
        count = rng.randint(2, 6)
        city, age = pick(rng, CITIES), rng.randint(18, 80)
        forms = [
            f"Give me a JSON object that describes {record} with the fields {fields}.",
            f"Write a JSON array of {count} objects, each describing {record} with {fields}.",
            f"Convert to JSON: {person}, {age} years old, lives in {city}.",
            f"Create an example JSON file for {record}. Answer with JSON only.",
            f"Return JSON with the keys {fields} for {person} from {city}.",
            f"Write a JSON schema for {record} with the fields {fields}.",
            f"Write a JSON configuration for a web server in {city} with the keys {fields}.",
            f"Make a JSON list of {count} {pick(rng, ITEMS)} with price and quantity.",
            f"Convert this list to JSON: {', '.join(rng.sample(NAMES, count))}.",
            f"Write a JSON response of an API that returns {record}, including {fields}.",
        ]
        return rng.choice(forms)

    def arithmetic(self) -> str:
        rng = self.rng
        a, b, c = (rng.randint(2, 99) for _ in range(3))
        item, name = pick(rng, ITEMS), pick(rng, NAMES)
        forms = [
            f"What is {a} + {b}?",
            f"What is {a} * {c}? Show the steps.",
            f"{name} has {a} {item} and buys {b} more. How many {item} does {name} have now?",
            f"{name} buys {a} {item} for {c} dollars each. How much does {name} pay in total?",
            f"A train travels {a * 10} km in {rng.randint(2, 9)} hours. What is its average speed?",
            f"There are {a} rows with {c} {item} in each row. How many {item} are there?",
            f"Compute {a} - {b} + {c} step by step.",
            f"What is {a} percent of {b * 10}?",
            f"{name} shares {a * 2} {item} equally among {rng.randint(2, 8)} friends. How many "
            f"does each friend get?",
            f"A rectangle is {a} cm long and {c} cm wide. Find its area and its perimeter.",
            f"Solve for x: {a}x + {b} = {a * c + b}.",
            f"Write the multiplication table of {rng.randint(2, 19)}.",
            f"Count from {a} to {a + rng.randint(10, 30)}.",
        ]
        return rng.choice(forms)

    def extraction(self) -> str:
        rng = self.rng
        first, second = rng.sample(NAMES, 2)
        message = (
            f"Hi {first}, this is {second} {pick(rng, SURNAMES)}. The meeting about "
            f"{pick(rng, TOPICS)} moves to {rng.randint(1, 28)} {rng.choice(MONTHS)} at "
            f"{rng.randint(8, 18)}:{rng.choice(['00', '15', '30'])} in {pick(rng, CITIES)}. Please "
            f"bring {rng.randint(2, 40)} {pick(rng, ITEMS)}. You can call me at "
            f"555-{rng.randint(1000, 9999)}."
        )
        text = rng.choice(self.notes) if self.notes and rng.random() < 0.5 else message
        ask = [
            "Summarize this text in one sentence",
            "List the key points of this text",
            "Extract all names, dates and places from this text",
            "What is the main topic of the following text?",
            "Extract the important nouns from this text as a list",
            "Rewrite this text in simpler words",
            "Repeat this text word by word",
            "Answer in one sentence what the following text is about",
            "Turn this text into three bullet points",
        ]
        return f"{rng.choice(ask)}:\n\n{text}"

    def lists(self) -> str:
        rng = self.rng
        count = rng.choice([3, 5, 5, 7, 10])
        thing = pick(rng, THINGS).split(" ", 1)[1]
        topic = pick(rng, TOPICS)
        forms = [
            f"List {count} examples of {thing}.",
            f"List {count} facts about {topic}.",
            f"Give me {count} tips about {topic}.",
            f"What are {count} important words about {topic}? Explain each one.",
            f"Name {count} examples of {thing} and describe each in one sentence.",
            f"Make a bullet list of the main ideas of {topic}.",
            f"Write a step by step guide about {topic}.",
            f"What are the advantages and disadvantages of {topic}?",
            f"Make a table of {count} examples of {thing} with two columns.",
            f"Give me {count} questions for a quiz about {topic}.",
        ]
        return rng.choice(forms)

    def chat(self) -> str:
        rng = self.rng
        topic = pick(rng, TOPICS)
        forms = [
            pick(rng, QUESTIONS),
            pick(rng, QUESTIONS),
            f"What is {topic}?",
            f"Explain {topic} to a ten year old child.",
            f"Tell me something interesting about {topic}.",
            f"Why does {topic} matter?",
            f"Hi! I am {pick(rng, NAMES)} from {pick(rng, CITIES)}. Can we talk about {topic}?",
            f"What do people often get wrong about {topic}?",
            f"Compare {topic} and {pick(rng, TOPICS)}.",
            f"Write a short email to {pick(rng, NAMES)} about {topic}.",
            f"Describe the history of {topic}.",
            f"Who are you and what can you tell me about {topic}?",
            f"Write a short paragraph about {topic} and {pick(rng, TOPICS)}.",
            f"What is the most important thing to know about {topic}?",
        ]
        if self.notes:
            forms += [
                f"What is this software for? {rng.choice(self.packages)}",
                f"Explain the following in simple words: {rng.choice(self.notes)}",
            ]
        return rng.choice(forms)

    def stories(self) -> str:
        rng = self.rng
        hero, place = pick(rng, HEROES), pick(rng, PLACES)
        forms = [
            f"Write a short story about {hero} {place}.",
            f"Tell me a bedtime story about {hero}.",
            f"Write the beginning of a novel about {hero} {place}.",
            f"Write a poem about {hero}.",
            f"Write a poem about {pick(rng, TOPICS)}.",
            f"Write a dialogue between {hero} and {pick(rng, HEROES)} {place}.",
            f"Continue this story: Once upon a time there was {hero} {place}.",
            f"Write a fairy tale in which {hero} learns about {pick(rng, TOPICS)}.",
        ]
        return rng.choice(forms)

    def translation(self) -> str:
        rng = self.rng
        tongue = pick(rng, TONGUES)
        several = " ".join(pick(rng, PHRASES) for _ in range(rng.randint(2, 4)))
        forms = [
            f"Translate to {tongue}: {pick(rng, PHRASES)}",
            f'How do you say "{pick(rng, PHRASES)}" in {tongue}?',
            f"Translate these sentences to {tongue}: {several}",
            f"Give me {rng.choice([5, 8, 10])} common {tongue} words with their English meaning.",
            f"Translate into {tongue} and explain the grammar: {pick(rng, PHRASES)}",
            f"Write a short dialogue in {tongue} about {pick(rng, TOPICS)}.",
        ]
        return rng.choice(forms)


MONTHS = words(
    "January|February|March|April|May|June|July|August|September|October|November|December"
)


def held_out() -> list[Prompt]:
    """The prompts of the evaluation, which training never sees."""
    listed = json.loads((HERE / "held_out.json").read_text(encoding="utf-8"))
    return [Prompt(category, text) for category, texts in listed.items() for text in texts]


def training_prompts(count: int, seed: int = 1, own: bool = False) -> Iterator[Prompt]:
    """`count` different prompts, categories mixed by `SHARES`; `own` as of `Maker`."""
    maker = Maker(seed, own)
    seen = {prompt.text for prompt in held_out()}
    categories, shares = list(SHARES), list(SHARES.values())
    made = 0
    while made < count:
        category = maker.rng.choices(categories, shares)[0]
        text = getattr(maker, category)()
        if text in seen:
            continue
        seen.add(text)
        made += 1
        yield Prompt(category, text)


# First words of questions that the target completes by itself.
OPENINGS = {
    "code": words(
        "Write a Python function that|Write a function to|Write a Python program that|"
        "Implement a|Create a Python class|Write a Python script to|def |"
        "Here is my code:\n```python\n|How do I use|Write a JavaScript function that|"
        "Write an SQL query|Fix the bug in this|Write a C++ program|Write code that|"
        "Develop a function|Explain this code:\n```python\ndef |Write a recursive function|"
        "Using Python, |Write a Bash script|I have a list of"
    ),
    "json": words(
        "Create a JSON object|Write a JSON|Give me JSON|Generate a JSON array|"
        "Convert the following to JSON:|Return a JSON object with|Design a JSON schema for|"
        "I need a JSON file|Here is a JSON object:\n{|Write an example of JSON|"
        "Represent as JSON:|Make a JSON list of"
    ),
    "arithmetic": words(
        "What is the sum of|Calculate|If a store sells|A farmer has|Solve the equation|"
        "A car travels|How many|Find the value of|The price of a|What is the area of|"
        "There are|Tom has|What is the average of|A recipe needs|If x|Compute|Maria buys"
    ),
    "extraction": words(
        "Extract the|Summarize the following text:|Read the following passage|"
        "Find all the names|What are the key points of|Summarize this email:|"
        "Rewrite the following sentence|Here is a text:|Identify the|Classify the following|"
        "From the text below,"
    ),
    "lists": words(
        "List five|List the|Give me a list of|Name three|What are the steps to|What are some|"
        "Provide a list of|Write ten|Make a list of|Give three examples of|What are the main|"
        "Write a step by step"
    ),
    "chat": words(
        "What is|How can I|Why do|Can you explain|I feel|What do you think about|"
        "Tell me about|How does|Who was|Hello!|I'm planning|What's the difference between|"
        "Should I|Describe|Write an email|Explain|I want to|What happens when|"
        "Could you help me|When did"
    ),
    "stories": words(
        "Write a story about|Write a short story|Tell me a story|Write a poem about|"
        "Once upon a time|Write a dialogue between|Create a fictional|Write a scene|"
        "Write a letter from|Describe a day in the life of|Continue the story:"
    ),
    "translation": words(
        "Translate the following sentence into French:|Translate to Spanish:|How do you say|"
        "Translate into German:|Translate this to Italian:|What does the French word|"
        "Translate the sentence|Write a sentence in Spanish|How do you write|"
        "Translate from English to Portuguese:"
    ),
}


def openings(count: int, seed: int = 1) -> Iterator[Prompt]:
    """`count` openings, categories mixed by `SHARES`; the same one comes many times."""
    rng = random.Random(seed)
    categories, shares = list(SHARES), list(SHARES.values())
    for _ in range(count):
        category = rng.choices(categories, shares)[0]
        yield Prompt(category, rng.choice(OPENINGS[category]))
