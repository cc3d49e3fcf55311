#!/usr/bin/env python3
"""Writes assets/real-prompts.jsonl: prompts to train a drafter for a real model with.

usage: scripts/real/prompts.py >assets/real-prompts.jsonl

A third each is mathematics, code and chat. All of the text was written for this file; a fixed seed combines it. It
holds no prompt of a public suite, and `deepspec-data split --decontaminate` looks for those all the same.
"""

import sys

if sys.argv[1:2] in (["-h"], ["--help"]):
    print(__doc__)
    sys.exit()

import json
import random

COUNT = 4500
random.seed(20261122)
pick, between = random.choice, random.randint

NAMES = "Amir Bella Carlos Dana Elif Farid Grace Hiro Ines Jonas Kavya Leon Mei Nadia Omar Priya Quentin Rosa Samir Tara Uma Viktor Wanda Yusuf Zoe".split()
THINGS = "apples books pencils marbles stickers tickets cookies bottles stamps coins cards shells eggs candles bricks plants photos chairs flags balloons".split()
PLACES = "a bakery,a library,a farm,a school,a workshop,a museum,a train station,a garden centre,a hospital,a cinema,a bookshop,a harbour".split(",")


def mathematics():
    a, b = random.sample(NAMES, 2)
    thing, place = pick(THINGS), pick(PLACES)
    n, m, k = between(12, 400), between(2, 12), between(3, 60)
    price, percent, hours = between(2, 40), pick([5, 10, 12, 15, 20, 25, 30, 40, 60, 75]), between(2, 9)
    return pick([
        f"{a} has {n * m} {thing} and packs them into boxes of {m}. {k} boxes are sent away. How many boxes are left?",
        f"At {place} {n} {thing} are delivered every morning and {k} are used each hour for {hours} hours. How many remain in the evening?",
        f"{a} earns {price} euros an hour and works {hours} hours a day. How much does {a} earn in {m} days, and how many days does it take to earn {price * hours * (m + 7)} euros?",
        f"A pair of shoes costs {price * 5} euros. The price falls by {percent} percent and then rises by {percent} percent. What is the price in the end?",
        f"{a} is {k} years old and {b} is {m} years older. In how many years will they be {2 * k + m + 20} years old together?",
        f"A train travels {n} kilometres in {hours} hours. At the same speed, how far does it go in {hours + m} hours? Show your steps.",
        f"Solve for x: {m}x + {k} = {m * between(3, 30) + k}.",
        f"Solve the system of equations: x + y = {n} and x - y = {between(1, 11)}.",
        f"Find the roots of x^2 - {m + hours}x + {m * hours} = 0 by factoring.",
        f"A rectangle is {m} metres longer than it is wide and its perimeter is {2 * (2 * k + m)} metres. Find its area.",
        f"What is the greatest common divisor of {n * m} and {k * m}? Explain how you find it.",
        f"How many ways are there to choose {pick([2, 3, 4])} students out of {between(6, 14)}? Explain your reasoning.",
        f"A bag holds {m} red, {hours} blue and {between(2, 9)} green marbles. Two are drawn without putting them back. What is the probability that both are red?",
        f"Compute the derivative of f(x) = {m}x^{hours} - {k}x + {price} and evaluate it at x = 2.",
        f"The sum of three consecutive integers is {3 * n}. What are they?",
        f"Convert {n / 8:g} kilometres per hour into metres per second.",
        f"The first term of an arithmetic sequence is {k} and the common difference is {m}. What is the {between(10, 40)}th term, and what is the sum up to it?",
        f"{a} and {b} share {thing} in the ratio {m}:{hours}. {a} gets {m * k}. How many do they have together?",
        f"What is {n} * {k}? Work it out step by step.",
        f"A circle has a radius of {m} centimetres. How long is its circumference and how large is its area?",
        f"Water fills a tank of {n * 10} litres at {k} litres a minute, while {m} litres a minute leak out. How long does it take to fill?",
        f"{a} reads {k} pages on the first day and {m} more on each day that follows. How many pages are read in {hours} days?",
        f"Simplify the expression {m}(x + {k}) - {hours}(x - {price}).",
        f"Which is larger, {m}/{m + 3} or {hours}/{hours + 4}? Explain without a calculator.",
    ])


TASKS = """reverses the words of a sentence
counts how often each word occurs in a text
checks whether a string is a palindrome
returns the second largest number of a list
merges two sorted lists into one sorted list
removes duplicates from a list but keeps the order
finds the longest common prefix of a list of strings
computes the factorial of a number without recursion
returns the first n prime numbers
flattens a nested list of any depth
groups a list of dictionaries by a key
rotates a matrix by ninety degrees
validates an email address with a regular expression
converts a Roman numeral to an integer
finds all pairs of numbers that add up to a target
implements binary search on a sorted list
computes the moving average of a list with a window of size k
parses a line of comma separated values with quotes
counts the islands in a grid of zeros and ones
checks whether brackets in a string are balanced
finds the shortest path in an unweighted graph
implements a stack that also returns its minimum in constant time
computes the edit distance between two strings
sorts a list of tuples by their second element
generates all permutations of a string
returns the n-th Fibonacci number with memoization
converts a temperature from Celsius to Fahrenheit and back
finds the median of an unsorted list
transposes a matrix given as a list of lists
compresses a string by counting repeated characters
finds the missing number in a list from 1 to n
computes the greatest common divisor of two integers
reads a file and returns its longest line
splits a list into chunks of size n
checks whether two strings are anagrams
inserts a value into a binary search tree
reverses a linked list
implements a least recently used cache
computes the depth of a binary tree
finds the most frequent element of a list
sums the digits of an integer
formats a number of seconds as hours, minutes and seconds
replaces every vowel of a text with a star
multiplies two matrices
finds the intersection of two lists
counts the days between two dates
encodes a text with a Caesar cipher
checks whether a year is a leap year
returns the power set of a set
finds the maximum sum of a contiguous subarray""".split("\n")
LANGUAGES = ["Python"] * 6 + ["JavaScript", "Java", "C++", "Rust", "Go"]
CONCEPTS = """list comprehensions in Python;the difference between a list and a tuple in Python;recursion;big O notation;hash tables;generators in Python;decorators in Python;pointers in C;
garbage collection;the difference between a process and a thread;SQL joins;indexes in a database;REST interfaces;unit tests;version control with git;regular expressions;exceptions in Python;
classes and inheritance;the difference between == and is in Python;breadth-first search;dynamic programming;queues and stacks;closures in JavaScript;promises in JavaScript;type hints in Python""".replace("\n", "").split(";")
SNIPPETS = """def f(xs):
    return [x for x in xs if x % 2]

def g(n):
    return n if n < 2 else g(n - 1) + g(n - 2)

def h(s):
    out = ''
    for c in s:
        out = c + out
    return out

total = 0
for i in range(10):
    if i % 3 == 0:
        total += i
print(total)

def find(xs, y):
    for i in range(len(xs)):
        if xs[i] == y:
            return i
    return -1

d = {}
for w in text.split():
    d[w] = d.get(w, 0) + 1

def mean(xs):
    return sum(xs) / len(xs)

with open('data.txt') as f:
    lines = [line.strip() for line in f if line.strip()]

class Counter:
    def __init__(self):
        self.n = 0
    def add(self):
        self.n += 1

def unique(xs):
    seen = set()
    return [x for x in xs if not (x in seen or seen.add(x))]""".split("\n\n")


def code():
    task, language, concept, snippet = pick(TASKS), pick(LANGUAGES), pick(CONCEPTS), pick(SNIPPETS)
    return pick([
        f"Write a {language} function that {task}.",
        f"Write a {language} function that {task}, and explain how it works.",
        f"Write a {language} function that {task}. Add a few test cases.",
        f"Give me a short {language} program that {task}. Handle empty input.",
        f"How would you write a function in {language} that {task}? What is its time complexity?",
        f"Complete this function:\n\ndef solve(data):\n    \"\"\"A function that {task}.\"\"\"\n",
        f"I need {language} code that {task}. Please comment each step.",
        f"Explain {concept} with a small example.",
        f"What are common mistakes with {concept}, and how can they be avoided?",
        f"What does this code do?\n\n```python\n{snippet}\n```",
        f"Find a weakness of this code and improve it:\n\n```python\n{snippet}\n```",
        f"Write unit tests for a function that {task}.",
    ])


TOPICS = """healthy breakfast;learning a new language;saving money as a student;growing tomatoes on a balcony;preparing for a job interview;sleeping better;the water cycle;photosynthesis;how vaccines work;
the causes of the French Revolution;how rainbows form;the solar system;plate tectonics;renewable energy;how the internet works;why the sky is blue;time management;public speaking;training for a first marathon;
packing for a week in the mountains;a vegetarian dinner for four;the history of tea;jazz music;impressionist painting;chess openings for beginners;how to adopt a dog;home office ergonomics;stress before exams;
reducing plastic waste;cycling to work;starting a book club;writing a short story;the human heart;how volcanoes erupt;black holes;supply and demand;inflation;the printing press;ancient Egypt;the Silk Road;
electric cars;artificial intelligence;how bees make honey;coral reefs;migration of birds;a budget for a family;a birthday party for children;cleaning a coffee machine;baking bread;a garden in a dry climate;
learning to play the guitar;taking better photos;meditation;first aid for burns;the rules of basketball;the importance of sleep;how glaciers shape land;why leaves change colour;how banks work;the scientific method""".replace("\n", "").split(";")
PEOPLE = "a child of ten,a beginner,a busy parent,a retired teacher,a new colleague,a curious teenager,someone who has never heard of it,a tourist".split(",")
FORMS = "a poem,a short story,a letter,a speech of one minute,a blog post,a dialogue between two friends,a product description,a diary entry".split(",")
SETTINGS = "a lighthouse in winter,a robot that learns to paint,a lost letter,a market at dawn,two rivals who become friends,a village without clocks,the last train home,a garden on the moon,an old violin,a storm at sea".split(",")


def chat():
    topic, other = random.sample(TOPICS, 2)
    person, form, setting, count = pick(PEOPLE), pick(FORMS), pick(SETTINGS), between(3, 7)
    return pick([
        f"Give me {count} tips about {topic}.",
        f"Explain {topic} to {person}.",
        f"What should I know about {topic} before I start?",
        f"Write {form} about {setting}.",
        f"Write {form} about {topic}.",
        f"Summarize the most important facts about {topic} in {count} sentences.",
        f"What are the advantages and disadvantages of {topic}?",
        f"Compare {topic} with {other}.",
        f"Write an email to {person} about {topic}.",
        f"Make a plan for one week around {topic}.",
        f"What are {count} common questions about {topic}? Answer each of them briefly.",
        f"Describe {topic} in simple words and give an example from daily life.",
        f"Why does {topic} matter today?",
        f"Suggest a title and an outline for an article about {topic}.",
        f"My friend asked me about {topic}. What would be a good answer?",
        f"List {count} surprising things about {topic}.",
        f"Rewrite this sentence in a friendly tone: You have to learn about {topic} by {pick(['Monday', 'Friday', 'next week', 'tomorrow'])}.",
        f"Imagine that you are {person}. What would you ask about {topic}?",
    ])


seen = set()
kinds = [mathematics, code, chat]
while len(seen) < COUNT:
    prompt = kinds[len(seen) % 3]()
    if prompt not in seen:
        print(json.dumps({"id": f"real-{len(seen):04d}", "conversations": [{"from": "human", "value": prompt}]}))
        seen.add(prompt)
