/* Importing kvcompress._C only loads the library; its static initialisers register the ops. */
#include <Python.h>

static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", "Native ops of kvcompress.", 0, NULL, slots,
                                        NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__C(void) { return PyModuleDef_Init(&definition); }
