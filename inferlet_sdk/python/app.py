"""The component's entry point; what is imported here is in the snapshot, and nothing else can be imported at run time."""

# ruff: noqa: F401
import abc
import argparse
import array
import ast
import asyncio
import base64
import binascii
import bisect
import calendar
import codecs
import collections
import collections.abc
import colorsys
import contextlib
import contextvars
import copy
import csv
import dataclasses
import datetime
import decimal
import difflib
import enum
import fnmatch
import fractions
import functools
import gc
import graphlib
import hashlib
import heapq
import hmac
import html
import html.parser
import inspect
import io
import itertools
import json
import keyword
import linecache
import logging
import math
import numbers
import operator
import pathlib
import pprint
import queue
import random
import re
import secrets
import statistics
import string
import struct
import sys
import textwrap
import time
import token
import tokenize
import traceback
import types
import typing
import unicodedata
import urllib.parse
import uuid
import warnings
import weakref
import xml.etree.ElementTree
import zlib
import zoneinfo
from asyncio import taskgroups, timeouts

import inferlet
import inferlet._run
import inferlet.text
import wit_world
from inferlet import _deny

_deny.install()
gc.collect()
gc.freeze()  # a collection at run time looks only at what the inferlet made


class Guest:
    """The exports of pie:abi/guest; componentize-py finds them by this name."""

    def start(self, request: str) -> str:
        return inferlet._run.start(request)

    def resume(self, events: str) -> str:
        return inferlet._run.resume(events)
