/* The functions of `plain.py`, which says what each of them means, at the speed of memory.

   Invariants: each gives what its namesake in `plain.py` gives, for every input; nothing is kept
   from one call to the next, no input is changed, and no byte is read beyond one. Ids are int32 in
   the machine's order of bytes. The limited API of Python 3.11: one build serves every later one. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    const char *at;
    const char *end;
} Text; /* what is left to read */

static int bytes_of(PyObject *object, Text *text)
{
    char *data;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(object, &data, &size) < 0)
        return -1;
    text->at = data;
    text->end = data + size;
    return 0;
}

static int arguments(const char *name, Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, wanted, given);
    return -1;
}

static inline int32_t id_at(const char *ids, Py_ssize_t n)
{
    int32_t id;
    memcpy(&id, ids + 4 * n, 4);
    return id;
}

/* -- JSON ----------------------------------------------------------------------------------- */

static inline void skip_space(Text *t)
{
    /* What is no space is above it, and that is nearly everything. */
    while (t->at < t->end && (unsigned char)*t->at <= ' ' &&
           (*t->at == ' ' || *t->at == '\n' || *t->at == '\r' || *t->at == '\t'))
        t->at++;
}

/* Behind the string that begins here; -1 where it does not end. */
static int skip_string(Text *t)
{
    t->at++;
    for (;;) {
        const char *quote = memchr(t->at, '"', t->end - t->at);
        if (quote == NULL)
            return -1;
        const char *before = quote;
        while (before > t->at && before[-1] == '\\')
            before--;
        t->at = quote + 1;
        if ((quote - before) % 2 == 0)
            return 0;
        /* The quote is escaped: it belongs to the string. Nothing before it is looked at again,
           and the run of backslashes that ended here does not go on. */
    }
}

/* Behind the value that begins here; -1 where it does not end. What is within it is not judged. */
static int skip_value(Text *t)
{
    int depth = 0;
    while (t->at < t->end) {
        char c = *t->at;
        if (c == '"') {
            if (skip_string(t) < 0)
                return -1;
            if (depth == 0)
                return 0;
            continue;
        }
        if (c == '{' || c == '[')
            depth++;
        else if (c == '}' || c == ']') {
            if (depth == 0)
                return 0; /* of what is around a number or a word */
            if (--depth == 0) {
                t->at++;
                return 0;
            }
        }
        else if (c == ',' && depth == 0)
            return 0;
        t->at++;
    }
    return -1;
}

/* One whole number without a fraction or an exponent; -1 where there is none, or it is no int32.
   Behind `end` stands a byte that is no digit: bytes of Python's end in a zero. */
static inline int read_id(Text *t, int32_t *id)
{
    const char *at = t->at;
    int negative = *at == '-';
    at += negative;
    const char *first = at;
    uint64_t number = 0;
    unsigned digit;
    while ((digit = (unsigned char)*at - '0') < 10) {
        number = 10 * number + digit;
        at++;
    }
    Py_ssize_t digits = at - first;
    if (digits == 0 || digits > 10 || (*first == '0' && digits > 1) ||
        number > (uint64_t)INT32_MAX + negative)
        return -1;
    *id = (int32_t)(negative ? -(int64_t)number : (int64_t)number);
    t->at = at;
    return 0;
}

static Py_ssize_t commas(const char *at, const char *end)
{
    Py_ssize_t found = 0;
    for (; at < end; at++)
        found += *at == ',';
    return found;
}

/* The ids of the list that begins here, as bytes; None where it holds anything else. */
static PyObject *read_list(Text *t)
{
    const char *close = memchr(t->at, ']', t->end - t->at);
    if (close == NULL)
        Py_RETURN_NONE;
    Text list = {t->at + 1, close};
    t->at = close + 1;
    skip_space(&list);
    if (list.at == close)
        return PyBytes_FromStringAndSize(NULL, 0);
    Py_ssize_t count = commas(list.at, close) + 1;
    PyObject *ids = PyBytes_FromStringAndSize(NULL, 4 * count);
    if (ids == NULL)
        return NULL;
    char *out = PyBytes_AsString(ids);
    for (Py_ssize_t n = 0; n < count; n++) {
        int32_t id;
        skip_space(&list);
        if (read_id(&list, &id) < 0 || id < 0)
            goto not_ids;
        memcpy(out + 4 * n, &id, 4);
        skip_space(&list);
        if (n + 1 < count ? list.at == close || *list.at++ != ',' : list.at != close)
            goto not_ids;
    }
    return ids;
not_ids:
    Py_DECREF(ids);
    Py_RETURN_NONE;
}

/* Cut lists of ids out of the object that begins here: `rest` gets the object without them (null
   in their places), `found` each list under its name. 1 if that was done, 0 if it is not to be
   done, -1 on an error of Python's. */
static int cut(Text t, PyObject *names, PyObject *found, char *rest, Py_ssize_t *length)
{
    const char *copied = t.at;
    char *out = rest;
    skip_space(&t);
    if (t.at == t.end || *t.at != '{')
        return 0;
    t.at++;
    Py_ssize_t wanted = PyTuple_Size(names);
    for (;;) {
        skip_space(&t);
        if (t.at == t.end || *t.at != '"')
            break; /* the end, or what the JSON reader is to complain of */
        const char *name = t.at + 1;
        if (skip_string(&t) < 0)
            return 0;
        Py_ssize_t size = t.at - 1 - name;
        if (memchr(name, '\\', size) != NULL)
            return 0; /* it may be a name of ours in other letters */
        PyObject *key = NULL;
        for (Py_ssize_t n = 0; n < wanted && key == NULL; n++) {
            Py_ssize_t its_size;
            const char *its = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(names, n), &its_size);
            if (its == NULL)
                return -1;
            if (its_size == size && memcmp(its, name, size) == 0)
                key = PyTuple_GetItem(names, n);
        }
        skip_space(&t);
        if (t.at == t.end || *t.at != ':')
            return 0;
        t.at++;
        skip_space(&t);
        int again = key == NULL ? 0 : PyDict_Contains(found, key);
        if (again)
            return again < 0 ? -1 : 0; /* which of them counts is the JSON reader's to say */
        if (key != NULL && t.at < t.end && *t.at == '[') {
            const char *begin = t.at;
            PyObject *ids = read_list(&t);
            if (ids == NULL)
                return -1;
            int ok = ids == Py_None ? 0 : PyDict_SetItem(found, key, ids) < 0 ? -1 : 1;
            Py_DECREF(ids);
            if (ok <= 0)
                return ok;
            memcpy(out, copied, begin - copied);
            out += begin - copied;
            memcpy(out, "null", 4);
            out += 4;
            copied = t.at;
        }
        else if (skip_value(&t) < 0)
            return 0;
        skip_space(&t);
        if (t.at == t.end || *t.at != ',')
            break;
        t.at++;
    }
    memcpy(out, copied, t.end - copied);
    *length = out + (t.end - copied) - rest;
    return 1;
}

static PyObject *read_object(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Text raw;
    (void)module;
    if (arguments("read_object", given, 3) < 0 || bytes_of(args[0], &raw) < 0)
        return NULL;
    if (!PyTuple_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "names must be a tuple");
    Py_ssize_t length = 0;
    PyObject *lists = PyDict_New();
    /* "[]" becomes "null": two bytes more for each name. */
    char *rest = PyMem_Malloc(raw.end - raw.at + 2 * PyTuple_Size(args[1]) + 1);
    if (lists == NULL || rest == NULL) {
        Py_XDECREF(lists);
        PyMem_Free(rest);
        return PyErr_NoMemory();
    }
    int done = cut(raw, args[1], lists, rest, &length);
    PyObject *text = done > 0 ? PyBytes_FromStringAndSize(rest, length) : NULL;
    PyMem_Free(rest);
    PyObject *found = NULL;
    if (text != NULL) {
        found = PyObject_CallFunctionObjArgs(args[2], text, NULL);
        Py_DECREF(text);
        if (found == NULL && PyErr_ExceptionMatches(PyExc_ValueError)) { /* it is no JSON */
            PyErr_Clear();
            done = 0;
        }
        else if (found != NULL && !PyDict_Check(found)) {
            Py_CLEAR(found);
            done = 0;
        }
        else if (found != NULL && PyDict_Update(found, lists) < 0)
            Py_CLEAR(found);
    }
    Py_DECREF(lists);
    if (done == 0)
        Py_RETURN_NONE;
    return found;
}

static PyObject *read_lists(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    (void)module;
    if (arguments("read_lists", given, 1) < 0)
        return NULL;
    PyObject *rows = args[0];
    Py_ssize_t count = PyList_Size(rows), total = 0;
    if (count < 0)
        return NULL;
    PyObject *lengths = PyBytes_FromStringAndSize(NULL, 4 * count), *values = NULL;
    if (lengths == NULL)
        return NULL;
    char *length = PyBytes_AsString(lengths);
    for (Py_ssize_t n = 0; n < count; n++) {
        Text row;
        if (bytes_of(PyList_GetItem(rows, n), &row) < 0)
            goto failed;
        Py_ssize_t size = row.end - row.at;
        int none = (size == 2 && !memcmp(row.at, "[]", 2)) || (size == 4 && !memcmp(row.at, "null", 4));
        int32_t its = none ? 0 : (int32_t)commas(row.at, row.end) + 1;
        memcpy(length + 4 * n, &its, 4);
        total += its;
    }
    values = PyBytes_FromStringAndSize(NULL, 4 * total);
    if (values == NULL)
        goto failed;
    char *out = PyBytes_AsString(values);
    for (Py_ssize_t n = 0; n < count; n++) {
        Text row;
        int32_t left = id_at(length, n);
        if (left == 0)
            continue;
        if (bytes_of(PyList_GetItem(rows, n), &row) < 0)
            goto failed;
        int good = row.at < row.end && *row.at++ == '[';
        for (; good && left > 0; left--) {
            int32_t id;
            good = read_id(&row, &id) == 0 && row.at < row.end && *row.at++ == (left > 1 ? ',' : ']');
            if (good) {
                memcpy(out, &id, 4);
                out += 4;
            }
        }
        if (!good || row.at != row.end) {
            PyErr_SetString(PyExc_ValueError, "not a JSON list of int32 without spaces");
            goto failed;
        }
    }
    PyObject *both = PyTuple_Pack(2, values, lengths);
    Py_DECREF(values);
    Py_DECREF(lengths);
    return both;
failed:
    Py_XDECREF(values);
    Py_DECREF(lengths);
    return NULL;
}

/* The three digits of each number below a thousand. */
static char digits_of[1001][4];

static void make_digits(void)
{
    for (int number = 0; number < 1000; number++) {
        digits_of[number][0] = (char)('0' + number / 100);
        digits_of[number][1] = (char)('0' + number / 10 % 10);
        digits_of[number][2] = (char)('0' + number % 10);
    }
}

/* Behind the number's digits; up to three bytes behind them may be written too. */
static char *write_number(char *out, uint32_t number)
{
    if (number >= 1000) {
        out = write_number(out, number / 1000);
        memcpy(out, digits_of[number % 1000], 4);
        return out + 3;
    }
    int zeros = (number < 100) + (number < 10);
    memcpy(out, digits_of[number] + zeros, 4);
    return out + 3 - zeros;
}

static inline char *write_id(char *out, int32_t id)
{
    if (id < 0)
        *out++ = '-';
    return write_number(out, id < 0 ? 0u - (uint32_t)id : (uint32_t)id);
}

static PyObject *write_list(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Text ids;
    (void)module;
    if (arguments("write_list", given, 1) < 0 || bytes_of(args[0], &ids) < 0)
        return NULL;
    Py_ssize_t count = (ids.end - ids.at) / 4;
    char *text = PyMem_Malloc(12 * count + 2); /* "-2147483648," */
    if (text == NULL)
        return PyErr_NoMemory();
    char *out = text;
    *out++ = '[';
    for (Py_ssize_t n = 0; n < count; n++) {
        if (n)
            *out++ = ',';
        out = write_id(out, id_at(ids.at, n));
    }
    *out++ = ']';
    PyObject *made = PyBytes_FromStringAndSize(text, out - text);
    PyMem_Free(text);
    return made;
}

/* -- journal lines -------------------------------------------------------------------------- */

/* The tables of a CRC-32 (zlib's) over eight bytes at a time. */
static uint32_t crc_tables[8][256];

static void make_crc_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
        crc_tables[0][byte] = crc;
    }
    for (uint32_t byte = 0; byte < 256; byte++)
        for (int n = 1; n < 8; n++) {
            uint32_t before = crc_tables[n - 1][byte];
            crc_tables[n][byte] = before >> 8 ^ crc_tables[0][before & 255];
        }
}

static uint32_t crc_of(const char *at, const char *end)
{
    const unsigned char *data = (const unsigned char *)at;
    uint32_t crc = 0xFFFFFFFFu;
    for (; end - (const char *)data >= 8; data += 8)
        crc = crc_tables[7][(crc ^ data[0]) & 255] ^ crc_tables[6][(crc >> 8 ^ data[1]) & 255] ^
              crc_tables[5][(crc >> 16 ^ data[2]) & 255] ^ crc_tables[4][crc >> 24 ^ data[3]] ^
              crc_tables[3][data[4]] ^ crc_tables[2][data[5]] ^ crc_tables[1][data[6]] ^
              crc_tables[0][data[7]];
    for (; (const char *)data < end; data++)
        crc = crc >> 8 ^ crc_tables[0][(crc ^ *data) & 255];
    return ~crc;
}

/* The number that eight hexadecimal digits (small ones) write; -1 where they are none. */
static int64_t read_hex(const char *at)
{
    int64_t number = 0;
    for (int n = 0; n < 8; n++) {
        char c = at[n];
        int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
        if (digit < 0)
            return -1;
        number = number << 4 | digit;
    }
    return number;
}

static int add_bytes(PyObject *list, const char *at, const char *end)
{
    PyObject *piece = PyBytes_FromStringAndSize(at, end - at);
    int added = piece == NULL ? -1 : PyList_Append(list, piece);
    Py_XDECREF(piece);
    return added;
}

static PyObject *read_lines(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Text block, kind;
    (void)module;
    if (arguments("read_lines", given, 2) < 0 || bytes_of(args[0], &block) < 0 ||
        bytes_of(args[1], &kind) < 0)
        return NULL;
    PyObject *found = Py_BuildValue("([][][])");
    if (found == NULL)
        return NULL;
    const char *end, *line = block.at;
    for (; (end = memchr(line, '\n', block.end - line)) != NULL; line = end + 1) {
        if (end - line < 12 || line[8] != ' ' || line[9] != *kind.at || line[10] != ' ' ||
            read_hex(line) != (int64_t)crc_of(line + 9, end))
            continue;
        const char *prompt = line + 11, *output, *columns;
        output = memchr(prompt, ' ', end - prompt);
        columns = output == NULL ? NULL : memchr(output + 1, ' ', end - output - 1);
        if (columns == NULL)
            continue;
        if (add_bytes(PyTuple_GetItem(found, 0), prompt, output) < 0 ||
            add_bytes(PyTuple_GetItem(found, 1), output + 1, columns) < 0 ||
            add_bytes(PyTuple_GetItem(found, 2), columns + 1, end) < 0) {
            Py_DECREF(found);
            return NULL;
        }
    }
    return found;
}

/* -- ids ------------------------------------------------------------------------------------ */

static PyObject *pack(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    (void)module;
    if (arguments("pack", given, 2) < 0)
        return NULL;
    long least = PyLong_AsLong(args[1]);
    if (least == -1 && PyErr_Occurred())
        return NULL;
    PyObject *items = PySequence_List(args[0]);
    if (items == NULL)
        return NULL;
    Py_ssize_t count = PyList_Size(items);
    PyObject *ids = PyBytes_FromStringAndSize(NULL, 4 * count);
    char *out = ids == NULL ? NULL : PyBytes_AsString(ids);
    for (Py_ssize_t n = 0; ids != NULL && n < count; n++) {
        PyObject *item = PyList_GetItem(items, n);
        int overflow = 0;
        long number = PyLong_CheckExact(item) ? PyLong_AsLongAndOverflow(item, &overflow) : 0;
        if (!PyLong_CheckExact(item) || overflow || number > INT32_MAX || number < least) {
            Py_DECREF(ids);
            Py_DECREF(items);
            Py_RETURN_NONE;
        }
        int32_t id = (int32_t)number;
        memcpy(out + 4 * n, &id, 4);
    }
    Py_DECREF(items);
    return ids;
}

static PyObject *within(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Text ids;
    (void)module;
    if (arguments("within", given, 2) < 0 || bytes_of(args[0], &ids) < 0)
        return NULL;
    long size = PyLong_AsLong(args[1]);
    if (size == -1 && PyErr_Occurred())
        return NULL;
    Py_ssize_t count = (ids.end - ids.at) / 4;
    uint32_t largest = 0; /* negative ones are large ones there */
    for (Py_ssize_t n = 0; n < count; n++) {
        uint32_t id = (uint32_t)id_at(ids.at, n);
        largest = id > largest ? id : largest;
    }
    return PyBool_FromLong(count == 0 || (int64_t)largest < size);
}

static PyObject *find(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Text ids, table;
    (void)module;
    if (arguments("find", given, 2) < 0 || bytes_of(args[0], &ids) < 0 || bytes_of(args[1], &table) < 0)
        return NULL;
    Py_ssize_t count = (ids.end - ids.at) / 4, size = table.end - table.at;
    PyObject *places = PyList_New(0);
    if (places == NULL)
        return NULL;
    for (Py_ssize_t n = 0; n < count; n++) {
        int32_t id = id_at(ids.at, n);
        if (id < 0 || id >= size) {
            Py_DECREF(places);
            Py_RETURN_NONE;
        }
        if (!table.at[id])
            continue;
        PyObject *place = PyLong_FromSsize_t(n);
        int added = place == NULL ? -1 : PyList_Append(places, place);
        Py_XDECREF(place);
        if (added < 0) {
            Py_DECREF(places);
            return NULL;
        }
    }
    return places;
}

static PyObject *spells(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Text ids, pieces, ends;
    (void)module;
    if (arguments("spells", given, 4) < 0 || bytes_of(args[0], &ids) < 0 ||
        bytes_of(args[1], &pieces) < 0 || bytes_of(args[2], &ends) < 0)
        return NULL;
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(args[3], &size);
    if (text == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError))
            return NULL;
        PyErr_Clear(); /* half a surrogate, which no bytes of a vocabulary spell */
        Py_RETURN_FALSE;
    }
    const char *end = text + size;
    Py_ssize_t count = (ids.end - ids.at) / 4, known = (ends.end - ends.at) / 4;
    for (Py_ssize_t n = 0; n < count; n++) {
        int32_t id = id_at(ids.at, n);
        if (id < 0 || id >= known)
            continue;
        Py_ssize_t from = id ? id_at(ends.at, id - 1) : 0, length = id_at(ends.at, id) - from;
        if (from < 0 || length < 0 || from + length > pieces.end - pieces.at)
            return PyErr_Format(PyExc_ValueError, "the ends are not those of the pieces");
        if (length > end - text || memcmp(text, pieces.at + from, length) != 0)
            Py_RETURN_FALSE;
        text += length;
    }
    return PyBool_FromLong(text == end);
}

enum { PERIODS = 128, REPEATS = 4, LOOP_IDS = 64 };

static PyObject *is_loop(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Text ids;
    (void)module;
    if (arguments("is_loop", given, 1) < 0 || bytes_of(args[0], &ids) < 0)
        return NULL;
    Py_ssize_t count = (ids.end - ids.at) / 4;
    for (Py_ssize_t period = 1; period <= PERIODS; period++) {
        Py_ssize_t span = REPEATS * period;
        if (span < LOOP_IDS + period)
            span = LOOP_IDS + period;
        if (span > count)
            break;
        const char *repeated = ids.at + 4 * (count - span + period);
        Py_ssize_t length = 4 * (span - period);
        /* The last ids first: they differ nearly always. */
        if (id_at(ids.at, count - 1) == id_at(ids.at, count - 1 - period) &&
            memcmp(repeated, repeated - 4 * period, length) == 0)
            Py_RETURN_TRUE;
    }
    Py_RETURN_FALSE;
}

#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef functions[] = {
    FUNCTION(read_object), FUNCTION(read_lists), FUNCTION(write_list), FUNCTION(read_lines),
    FUNCTION(pack), FUNCTION(within), FUNCTION(find), FUNCTION(spells), FUNCTION(is_loop),
    {NULL, NULL, 0, NULL},
};

static int begin(PyObject *module)
{
    (void)module;
    make_crc_tables();
    make_digits();
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)begin}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "eyas.core._fast", NULL, 0, functions, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__fast(void)
{
    return PyModuleDef_Init(&definition);
}
